/* StoreRows, LoadRows: the table. Loop thread only. */
#include "server/supervisor/load_rows.h"
#include "server/supervisor/methods.h"
#include "server/supervisor/store_rows.h"

static const struct kvp_rpc_method methods[] = {
    {.name = "StoreRows",
     .shape = KVP_RPC_CLIENT_STREAM,
     .request = &kvpool__v1__store_rows_request__descriptor,
     .on_message = kvp_store_rows_on_message,
     .on_closed = kvp_store_rows_on_closed},
    {.name = "LoadRows",
     .shape = KVP_RPC_SERVER_STREAM,
     .request = &kvpool__v1__load_rows_request__descriptor,
     .on_message = kvp_load_rows_on_message,
     .on_closed = kvp_load_rows_on_closed,
     .on_writable = kvp_load_rows_on_writable},
};

const struct kvp_method_table kvp_methods_rows = {methods, sizeof methods / sizeof methods[0]};
