/* The boundary between the core and an MPI plugin. A plugin is the only code compiled against mpi.h: one shared
   library a family of MPI libraries, loaded at run time into a process whose MPI is up. Plain C, no ownership beyond
   the requests. Functions that return int return 0, or an MPI error code that error_text() explains. */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ZC_MPI_PLUGIN_VERSION 1
#define ZC_MPI_PLUGIN_SYMBOL "zc_mpi_plugin"

typedef struct ZcMpiPlugin {
  int version;            /* ZC_MPI_PLUGIN_VERSION of the plugin's build */
  const char* built_with; /* name of the MPI library whose headers it was compiled with */

  void (*library_version)(char* out, int room);     /* of the library that is loaded */
  int (*is_active)(void);                           /* initialised and not finalised */
  int (*thread_level)(int* level, int* serialized); /* what the library grants; MPI_THREAD_SERIALIZED */
  void (*error_text)(int code, char* out, int room);

  /* communicator: a Fortran handle, the same small integer in every MPI binding; `open` makes errors return. */
  int (*open)(int fortran_handle, intptr_t* communicator, int* rank, int* size);

  int (*isend)(intptr_t communicator, int peer, const void* data, int bytes, int tag, intptr_t* request);
  int (*irecv)(intptr_t communicator, int peer, void* data, int bytes, int tag, intptr_t* request);
  int (*test)(intptr_t* request, int* done);
  int (*cancel)(intptr_t* request);  /* of a receive; it must still be tested until done */
  int (*release)(intptr_t* request); /* forgets a request that has not completed */
} ZcMpiPlugin;

/* Exported under ZC_MPI_PLUGIN_SYMBOL. */
typedef const ZcMpiPlugin* (*ZcMpiPluginEntry)(void);

#ifdef __cplusplus
}
#endif
