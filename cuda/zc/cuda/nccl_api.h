// NCCL's C interface, as far as it is used here. The library is found at run time and nothing of it is needed to build:
// the framework brings a copy of its own, and two of them in a process do not go together.
#pragma once

#include <climits>
#include <cstddef>
#include <string>

namespace zc::cuda {

struct NcclApi {
  using Comm = void*;
  using Stream = void*;

  enum Result : int { kSuccess = 0, kInProgress = 7 };
  enum Type : int { kUint8 = 1, kInt64 = 4, kF16 = 6, kF32 = 7, kBF16 = 9 };
  enum ReduceOp : int { kSum = 0, kMax = 2 };
  struct UniqueId {
    char bytes[128];
  };
  // As of 2.17; later versions take it, and what they added stays at its default.
  struct Config {
    std::size_t size = sizeof(Config);
    unsigned magic = 0xcafebeef;
    unsigned version = 21700;
    int blocking = 0;
    int cga_cluster_size = INT_MIN;
    int min_ctas = INT_MIN;
    int max_ctas = INT_MIN;
    const char* net_name = nullptr;
  };
  // Before it a thread that uses two communicators which do not block may crash in NCCL (nccl issue 1605), and stage 3
  // has two.
  static constexpr int kOldestVersion = 22703;

  int (*get_version)(int* version) = nullptr;
  int (*get_unique_id)(UniqueId* id) = nullptr;
  int (*comm_init_rank_config)(Comm* comm, int size, UniqueId id, int rank, Config* config) = nullptr;
  int (*comm_finalize)(Comm comm) = nullptr;
  int (*comm_destroy)(Comm comm) = nullptr;
  int (*comm_abort)(Comm comm) = nullptr;
  int (*comm_get_async_error)(Comm comm, int* result) = nullptr;
  const char* (*get_error_string)(int result) = nullptr;
  const char* (*get_last_error)(Comm comm) = nullptr;
  int (*group_start)() = nullptr;
  int (*group_end)() = nullptr;
  int (*send)(const void* from, std::size_t count, int type, int peer, Comm comm, Stream stream) = nullptr;
  int (*recv)(void* to, std::size_t count, int type, int peer, Comm comm, Stream stream) = nullptr;
  int (*all_gather)(const void* from, void* to, std::size_t send_count, int type, Comm comm, Stream stream) = nullptr;
  int (*reduce_scatter)(const void* from, void* to, std::size_t receive_count, int type, int op, Comm comm,
                        Stream stream) = nullptr;
  int (*all_reduce)(const void* from, void* to, std::size_t count, int type, int op, Comm comm,
                    Stream stream) = nullptr;
  int (*broadcast)(const void* from, void* to, std::size_t count, int type, int root, Comm comm,
                   Stream stream) = nullptr;

  std::string description;  // "NCCL 2.27.3 (/opt/nccl/libnccl.so.2)"
};

// Fills in one function after the other: for each, calls `symbol` with its name in the library and where it goes.
template <class Symbol>
void for_each_symbol(NcclApi& api, Symbol symbol) {
  symbol("ncclGetVersion", api.get_version);
  symbol("ncclGetUniqueId", api.get_unique_id);
  symbol("ncclCommInitRankConfig", api.comm_init_rank_config);
  symbol("ncclCommFinalize", api.comm_finalize);
  symbol("ncclCommDestroy", api.comm_destroy);
  symbol("ncclCommAbort", api.comm_abort);
  symbol("ncclCommGetAsyncError", api.comm_get_async_error);
  symbol("ncclGetErrorString", api.get_error_string);
  symbol("ncclGetLastError", api.get_last_error);
  symbol("ncclGroupStart", api.group_start);
  symbol("ncclGroupEnd", api.group_end);
  symbol("ncclSend", api.send);
  symbol("ncclRecv", api.recv);
  symbol("ncclAllGather", api.all_gather);
  symbol("ncclReduceScatter", api.reduce_scatter);
  symbol("ncclAllReduce", api.all_reduce);
  symbol("ncclBroadcast", api.broadcast);
}

// The library that the process has loaded already (the framework's), else the file `path` where that is not empty, else
// the system's. Throws kUnsupported that says where it was looked for, or what is wrong with what was found: then no
// other is tried. It stays loaded. Once for all threads; `path` counts at the first call that succeeds.
const NcclApi& load_nccl(const std::string& path);

// The same of a library of this name, each time anew.
NcclApi open_nccl(const std::string& name, const std::string& path);

// Throws kUnsupported when the version that the library reports is too old. Fills in the description.
void check_nccl_version(NcclApi& api, const std::string& where);

}  // namespace zc::cuda
