#include "zc/comm/mpi_transport.h"

#include <dlfcn.h>

#include <chrono>
#include <thread>

#include "zc/base/error.h"
#include "zc/comm/mpi_plugin_api.h"
#include "zc/comm/transport_communicator.h"

namespace zc::comm {
namespace {

// A receive that MPI has already matched cannot be cancelled: it ends when its sender has sent. This is how long to
// wait for that before giving MPI up.
constexpr std::chrono::milliseconds kCancelLimit{1000};

constexpr const char* kSilent = "[comm] MPI is out of use: a transfer was broken off by a failure before.";

const ZcMpiPlugin& load(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);  // stays for the life of the process
  if (library == nullptr) {
    const char* reason = dlerror();
    fail(ErrorKind::kConfig, "[comm] the MPI plugin ", path, " cannot be loaded: ", reason ? reason : "unknown error",
         ". Reinstall zerocore in the environment whose MPI library it shall use.");
  }
  auto entry = reinterpret_cast<ZcMpiPluginEntry>(dlsym(library, ZC_MPI_PLUGIN_SYMBOL));
  ZC_CHECK(entry != nullptr, kConfig, "[comm] ", path, " is not an MPI plugin of zerocore: it has no symbol ",
           ZC_MPI_PLUGIN_SYMBOL, ". Reinstall zerocore.");
  const ZcMpiPlugin& plugin = *entry();
  ZC_CHECK(plugin.version == ZC_MPI_PLUGIN_VERSION, kConfig, "[comm] ", path,
           " is of another build: got plugin version ", plugin.version, ", expected ", ZC_MPI_PLUGIN_VERSION,
           ". Reinstall zerocore.");
  return plugin;
}

std::string library_version(const ZcMpiPlugin& plugin) {
  char text[8192] = "";
  plugin.library_version(text, sizeof text);
  const std::string version(text);
  return version.substr(0, version.find('\n'));
}

class MpiTransport final : public Transport {
 public:
  MpiTransport(const ZcMpiPlugin& plugin, int fortran_handle) : plugin_(plugin) {
    check(plugin_.open(fortran_handle, &communicator_, &rank_, &size_), "opening the communicator");
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const char* name() const override { return "mpi"; }

  Request send(int peer, const void* data, std::int64_t bytes, int tag) override {
    check_usable(bytes);
    auto pending = std::make_unique<Pending>();
    check(plugin_.isend(communicator_, peer, data, static_cast<int>(bytes), tag, &pending->handle), "MPI_Isend");
    return pending.release();
  }

  Request receive(int peer, void* data, std::int64_t bytes, int tag) override {
    check_usable(bytes);
    auto pending = std::make_unique<Pending>();
    pending->is_receive = true;
    check(plugin_.irecv(communicator_, peer, data, static_cast<int>(bytes), tag, &pending->handle), "MPI_Irecv");
    return pending.release();
  }

  bool test(Request& request) override {
    auto* pending = static_cast<Pending*>(request);
    if (pending == nullptr) return true;
    ZC_CHECK(!silent_, kComm, kSilent);
    int done = 0;
    check(plugin_.test(&pending->handle, &done), "MPI_Test");
    if (!done) return false;
    delete pending;
    request = nullptr;
    return true;
  }

  bool cancel(Request& request) noexcept override {
    const std::unique_ptr<Pending> pending(static_cast<Pending*>(request));
    request = nullptr;
    if (!pending) return true;
    if (silent_ || !plugin_.is_active()) return pending->is_receive;  // MPI, not being called, writes nothing
    if (pending->is_receive) plugin_.cancel(&pending->handle);
    int done = 0;
    const auto deadline = std::chrono::steady_clock::now() + kCancelLimit;
    while (plugin_.test(&pending->handle, &done) == 0 && !done && pending->is_receive &&
           std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    if (done) return true;
    // MPI moves data only inside calls to it. With a receive it cannot give back, the one way to keep it off memory
    // that may be freed is to call it no more.
    if (pending->is_receive) silent_ = true;
    plugin_.release(&pending->handle);
    return pending->is_receive;
  }

 private:
  struct Pending {
    std::intptr_t handle = 0;
    bool is_receive = false;
  };

  void check(int code, const char* what) const {
    if (code == 0) return;
    char text[512] = "";
    plugin_.error_text(code, text, sizeof text);
    fail(ErrorKind::kComm, "[comm] ", what, " failed: ", text);
  }

  void check_usable(std::int64_t bytes) const {
    ZC_CHECK(bytes <= kMaxMessageBytes, kInternal, "[comm] a message is too long: got ", bytes,
             " bytes, expected at most ", kMaxMessageBytes);
    ZC_CHECK(!silent_, kComm, kSilent);
    ZC_CHECK(plugin_.is_active(), kComm,
             "[comm] MPI has been finalised while zerocore uses it. Finalise MPI at the end of the program, or leave "
             "it to mpi4py.");
  }

  const ZcMpiPlugin& plugin_;
  std::intptr_t communicator_ = 0;
  int rank_ = 0;
  int size_ = 0;
  bool silent_ = false;
};

}  // namespace

std::unique_ptr<Transport> make_mpi_transport(const std::string& plugin_path, int fortran_handle) {
  const ZcMpiPlugin& plugin = load(plugin_path);
  ZC_CHECK(plugin.is_active(), kConfig, "[comm] two MPI libraries are loaded: zerocore's plugin (built with ",
           plugin.built_with, ") runs on ", library_version(plugin),
           ", which is not the one that mpi4py has initialised. Reinstall zerocore in this environment, with the MPI "
           "library that mpi4py uses.");
  int level = 0;
  int serialized = 0;
  const int code = plugin.thread_level(&level, &serialized);
  ZC_CHECK(code == 0 && level >= serialized, kConfig, "[comm] MPI grants too low a thread level: got ", level,
           ", expected at least ", serialized,
           " (MPI_THREAD_SERIALIZED). Leave mpi4py.rc.thread_level at \"multiple\", "
           "its default, and do not initialise MPI yourself with less.");
  return std::make_unique<MpiTransport>(plugin, fortran_handle);
}

std::shared_ptr<Communicator> make_mpi_communicator(const std::string& plugin_path, int fortran_handle,
                                                    Options options) {
  return make_transport_communicator(make_mpi_transport(plugin_path, fortran_handle), options);
}

}  // namespace zc::comm
