// The MPI plugin: raw MPI calls behind a table of C functions, and nothing else.
#include <mpi.h>

#include <cstdio>
#include <cstring>

#include "zc/comm/mpi_plugin_api.h"

namespace {

// Handles are pointers in one family of MPI libraries and ints in the other; both fit an intptr_t.
template <class Handle>
intptr_t to_bits(Handle handle) {
  intptr_t bits = 0;
  static_assert(sizeof handle <= sizeof bits);
  std::memcpy(&bits, &handle, sizeof handle);
  return bits;
}

template <class Handle>
Handle from_bits(intptr_t bits) {
  Handle handle;
  std::memcpy(&handle, &bits, sizeof handle);
  return handle;
}

void library_version(char* out, int room) {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  MPI_Get_library_version(text, &length);
  std::snprintf(out, static_cast<size_t>(room), "%s", text);
}

int is_active() {
  int initialized = 0;
  int finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  return initialized && !finalized;
}

int thread_level(int* level, int* serialized) {
  *serialized = MPI_THREAD_SERIALIZED;
  return MPI_Query_thread(level);
}

void error_text(int code, char* out, int room) {
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  std::snprintf(out, static_cast<size_t>(room), "%s", text);
}

int open(int fortran_handle, intptr_t* communicator, int* rank, int* size) {
  MPI_Comm handle = MPI_Comm_f2c(static_cast<MPI_Fint>(fortran_handle));
  *communicator = to_bits(handle);
  int code = MPI_Comm_set_errhandler(handle, MPI_ERRORS_RETURN);
  if (code == MPI_SUCCESS) code = MPI_Comm_rank(handle, rank);
  if (code == MPI_SUCCESS) code = MPI_Comm_size(handle, size);
  return code;
}

int isend(intptr_t communicator, int peer, const void* data, int bytes, int tag, intptr_t* request) {
  MPI_Request handle = MPI_REQUEST_NULL;
  const int code = MPI_Isend(data, bytes, MPI_BYTE, peer, tag, from_bits<MPI_Comm>(communicator), &handle);
  *request = to_bits(handle);
  return code;
}

int irecv(intptr_t communicator, int peer, void* data, int bytes, int tag, intptr_t* request) {
  MPI_Request handle = MPI_REQUEST_NULL;
  const int code = MPI_Irecv(data, bytes, MPI_BYTE, peer, tag, from_bits<MPI_Comm>(communicator), &handle);
  *request = to_bits(handle);
  return code;
}

int test(intptr_t* request, int* done) {
  auto handle = from_bits<MPI_Request>(*request);
  const int code = MPI_Test(&handle, done, MPI_STATUS_IGNORE);
  *request = to_bits(handle);
  return code;
}

int cancel(intptr_t* request) {
  auto handle = from_bits<MPI_Request>(*request);
  return MPI_Cancel(&handle);
}

int release(intptr_t* request) {
  auto handle = from_bits<MPI_Request>(*request);
  const int code = MPI_Request_free(&handle);
  *request = to_bits(handle);
  return code;
}

#if defined(OPEN_MPI)
#define ZC_STRING_OF(x) #x
#define ZC_STRING(x) ZC_STRING_OF(x)
constexpr const char* kBuiltWith =
    "Open MPI " ZC_STRING(OMPI_MAJOR_VERSION) "." ZC_STRING(OMPI_MINOR_VERSION) "." ZC_STRING(OMPI_RELEASE_VERSION);
#elif defined(MPICH_VERSION)
constexpr const char* kBuiltWith = "MPICH " MPICH_VERSION;
#else
constexpr const char* kBuiltWith = "an MPI library of another family";
#endif

constexpr ZcMpiPlugin kPlugin = {
    ZC_MPI_PLUGIN_VERSION,
    kBuiltWith,
    library_version,
    is_active,
    thread_level,
    error_text,
    open,
    isend,
    irecv,
    test,
    cancel,
    release,
};

}  // namespace

extern "C" __attribute__((visibility("default"))) const ZcMpiPlugin* zc_mpi_plugin(void) { return &kPlugin; }
