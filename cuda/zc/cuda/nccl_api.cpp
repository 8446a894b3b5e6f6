#include "zc/cuda/nccl_api.h"

#include <dlfcn.h>

#include <type_traits>

#include "zc/base/error.h"

namespace zc::cuda {
namespace {

constexpr const char* kName = "libnccl.so.2";

// 22703: "2.27.3"
std::string text_of_version(int version) {
  return concat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

std::string file_of(void* symbol) {
  Dl_info info{};
  return dladdr(symbol, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "an unknown file";
}

}  // namespace

void check_nccl_version(NcclApi& api, const std::string& where) {
  int version = 0;
  const int result = api.get_version(&version);
  ZC_CHECK(result == NcclApi::kSuccess, kUnsupported, "[cuda] NCCL (", where,
           ") does not tell its version: got result ", result, " of ncclGetVersion");
  ZC_CHECK(version >= NcclApi::kOldestVersion, kUnsupported, "[cuda] NCCL is too old: got ", text_of_version(version),
           " (", where, "), expected ", text_of_version(NcclApi::kOldestVersion),
           " or later. Install a later nvidia-nccl wheel, or a later torch, which brings its own.");
  api.description = concat("NCCL ", text_of_version(version), " (", where, ")");
}

NcclApi open_nccl(const std::string& name, const std::string& path) {
  struct Candidate {
    const char* file;
    int flags;
  };
  const Candidate candidates[] = {{name.c_str(), RTLD_NOLOAD}, {path.c_str(), 0}, {name.c_str(), 0}};
  void* library = nullptr;
  const char* file = "";
  std::string tried;
  for (const Candidate& candidate : candidates) {
    if (*candidate.file == '\0') continue;
    file = candidate.file;
    library = dlopen(file, RTLD_NOW | RTLD_LOCAL | candidate.flags);
    if (library != nullptr) break;
    const char* reason = dlerror();
    if (candidate.flags == RTLD_NOLOAD) reason = "not loaded by this process";
    tried += concat(tried.empty() ? "" : "; ", candidate.file, ": ", reason != nullptr ? reason : "not found");
  }
  ZC_CHECK(library != nullptr, kUnsupported, "[cuda] NCCL was not found, which ranks on several GPUs need (", tried,
           "). Install torch with CUDA, or the nvidia-nccl wheel of the same CUDA version.");
  NcclApi api;
  for_each_symbol(api, [&](const char* symbol, auto& function) {
    void* const found = dlsym(library, symbol);
    ZC_CHECK(found != nullptr, kUnsupported, "[cuda] the library found as NCCL has no ", symbol, ": got ", file,
             ", expected NCCL ", text_of_version(NcclApi::kOldestVersion), " or later");
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
  });
  check_nccl_version(api, file_of(reinterpret_cast<void*>(api.get_version)));
  return api;
}

const NcclApi& load_nccl(const std::string& path) {
  static const NcclApi api = open_nccl(kName, path);
  return api;
}

}  // namespace zc::cuda
