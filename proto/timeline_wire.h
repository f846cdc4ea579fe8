/* Timelines of one attachment: words in a memfd that worker and executor map, and that GPUs may write.
 *
 * A word counts up. It has one writer: words [0, kvp_client_words) are the worker's, the others the executor's. Each
 * has a cache line of its own. CPUs write with release stores and read with acquire loads, GPUs with stream memory
 * operations or release stores at system scope.
 *
 * A value is below KVP_TIMELINE_POISON. That bit alone in a word says that what should have counted it up has failed;
 * as it is larger than any value, a wait for >= ends too. A poisoned word stays so: its writer takes another one.
 *
 * Signals of one word should go up: the executor writes what a step says, in the order of the ring. To a word that it
 * has poisoned it writes nothing more but the poison. When an attachment ends, all the executor's words are poisoned.
 *
 * A captured graph that waits with constants sets a word of the executor's back to 0 where it begins, behind its wait for
 * the last value of the launch before; signals of such a word are absolute (KVP_POINT_ABSOLUTE).
 *
 * The executor trusts nothing here: what it relies on itself never comes from memory that a worker can write.
 */
#ifndef KVPOOL_PROTO_TIMELINE_WIRE_H
#define KVPOOL_PROTO_TIMELINE_WIRE_H

#include <stdint.h>
#ifndef __cplusplus
#include <stdatomic.h>
#endif

#define KVP_TIMELINE_POISON (UINT64_C(1) << 62)

enum {
  kvp_client_words = 512,
  kvp_executor_words = 512,
  kvp_timeline_words = kvp_client_words + kvp_executor_words,
  kvp_timeline_bytes = kvp_timeline_words * 64, /* of the memfd */
};

#ifndef __cplusplus /* GPU kernels need the numbers */
struct kvp_timeline_word {
  _Alignas(64) _Atomic uint64_t value;
};
_Static_assert(sizeof(struct kvp_timeline_word) == 64, "a cache line of its own");
#endif

#endif
