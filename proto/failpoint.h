/* Places of the protocols where a process of a test build ends as by kill -9: once, when a file of the place's name stands in
 * the folder $KVPOOL_FAILPOINTS_FOLDER, which takes the file away. Other builds have nothing of it (KVPOOL_FAILPOINTS).
 */
#ifndef KVPOOL_PROTO_FAILPOINT_H
#define KVPOOL_PROTO_FAILPOINT_H

#ifdef KVPOOL_FAILPOINTS
void kvp_failpoint_pass(const char *name);
#define KVP_FAILPOINT(name) kvp_failpoint_pass(name)
#else
#define KVP_FAILPOINT(name) ((void)0)
#endif

#endif
