// The header from C++: it compiles, links, and its types can be used.
#include <kvpool/kvpool.h>

#include <cstdio>
#include <cstring>
#include <vector>

int main() {
  const std::vector<int32_t> table = {5, 3};
  std::vector<kvpool_segment> segments(2);
  size_t count = 0;
  kvpool_error error = {};
  if (kvpool_plan_paged_range(table.data(), table.size(), 16, 4, 20, 0, segments.data(), segments.size(), &count,
                              &error) != KVPOOL_OK ||
      count != 2 || segments[1].src_block != 3 || segments[1].dst_offset != 12) {
    (void)std::fprintf(stderr, "plan: %s\n", error.text);
    return 1;
  }
  kvpool_connect_options options = {};
  options.size_bytes = sizeof options;
  kvpool_client *client = nullptr;
  if (kvpool_client_connect("/nonexistent/socket", &options, &client, &error) != KVPOOL_DISCONNECTED ||
      client != nullptr || std::strcmp(kvpool_status_name(error.status), "disconnected") != 0) {
    (void)std::fprintf(stderr, "connect: %s\n", error.text);
    return 1;
  }
  return 0;
}
