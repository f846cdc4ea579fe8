/* Prints the version of the library it found, and that nobody listens where nobody does. */
#include <kvpool/kvpool.h>
#include <stdio.h>

int main(void) {
  kvpool_client *client;
  kvpool_error error;
  kvpool_status status = kvpool_client_connect("/nonexistent/socket", NULL, &client, &error);
  (void)printf("libkvpool %s: %s\n", kvpool_version(), kvpool_status_name(status));
  return status == KVPOOL_DISCONNECTED ? 0 : 1;
}
