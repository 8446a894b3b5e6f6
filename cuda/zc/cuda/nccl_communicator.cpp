#include "zc/cuda/nccl_communicator.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "zc/cuda/in_flight.h"
#include "zc/cuda/over_host.h"

namespace zc::cuda {
namespace {

using comm::Op;
using comm::Work;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::microseconds kPoll{20};
constexpr std::chrono::milliseconds kLookForFailures{100};
constexpr std::chrono::milliseconds kPeerFailedPatience{1000};
constexpr std::chrono::seconds kFinalizePatience{10};

int nccl_type(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return NcclApi::kF32;
    case DType::kF16:
      return NcclApi::kF16;
    default:
      return NcclApi::kBF16;
  }
}

// An NCCL communicator. No call blocks: what takes longer is asked for again and again, so that a timeout or a failure
// elsewhere can end it.
class NcclComm {
 public:
  using Failure = std::function<std::string()>;  // why to give up meanwhile; empty: go on

  NcclComm(const NcclApi& api, CudaDevice& device, const NcclApi::UniqueId& id, int size, int rank,
           std::chrono::milliseconds timeout, const Failure& failure)
      : api_(api), device_(device) {
    const OnDevice on(device_.runtime(), device_.id().index);
    NcclApi::Config config;
    std::unique_lock lock(mutex_);
    try {
      settle(lock, "ncclCommInitRankConfig", api_.comm_init_rank_config(&comm_, size, id, rank, &config), timeout,
             failure);
    } catch (...) {
      if (!lock.owns_lock()) lock.lock();
      end(false);
      throw;
    }
  }

  // Waits, at most for kFinalizePatience where all is well, else for NCCL to give up.
  ~NcclComm() { end(true); }

  // Calls body(comm), whose NCCL calls are put on their streams together. Throws kComm.
  template <class Body>
  void run(std::chrono::milliseconds timeout, const Failure& failure, Body body) {
    const OnDevice on(device_.runtime(), device_.id().index);
    std::unique_lock lock(mutex_);
    ZC_CHECK(comm_ != nullptr, kComm, "[cuda] the NCCL communicator was aborted");
    int result = api_.group_start();
    const char* call = "ncclGroupStart";
    if (result == NcclApi::kSuccess) {
      const auto note = [&](const char* name, int its_result) {
        if (result == NcclApi::kSuccess && its_result != NcclApi::kInProgress) result = its_result, call = name;
      };
      body(comm_, note);
      const int end = api_.group_end();  // also after an error: else the group stays open
      if (result == NcclApi::kSuccess) result = end, call = "ncclGroupEnd";
    }
    settle(lock, call, result, timeout, failure);
  }

  std::string error() {
    const std::lock_guard lock(mutex_);
    if (comm_ == nullptr) return {};
    int state = NcclApi::kSuccess;
    const int result = api_.comm_get_async_error(comm_, &state);
    if (result == NcclApi::kSuccess && (state == NcclApi::kSuccess || state == NcclApi::kInProgress)) return {};
    return text_of("a collective under way", result != NcclApi::kSuccess ? result : state);
  }

  void abort() {
    const std::lock_guard lock(mutex_);
    end(false);
  }

 private:
  std::string text_of(const char* call, int result) {
    const char* detail = comm_ != nullptr ? api_.get_last_error(comm_) : "";
    return concat("NCCL reports \"", api_.get_error_string(result), "\" for ", call, " on cuda:", device_.id().index,
                  detail != nullptr && *detail != '\0' ? concat(" (", detail, ")") : "");
  }

  // Returns once the calls have been carried out: then what they put on streams is there.
  void settle(std::unique_lock<std::mutex>& lock, const char* call, int result, std::chrono::milliseconds timeout,
              const Failure& failure) {
    const auto deadline = Clock::now() + timeout;
    while (result == NcclApi::kInProgress) {
      int state = NcclApi::kSuccess;
      result = api_.comm_get_async_error(comm_, &state);
      if (result == NcclApi::kSuccess) result = state;
      if (result != NcclApi::kInProgress) break;
      lock.unlock();  // for who aborts it
      const std::string reason = failure();
      ZC_CHECK(reason.empty(), kComm, reason);
      ZC_CHECK(Clock::now() < deadline, kComm, "[cuda] timed out after ", static_cast<double>(timeout.count()) / 1000,
               " s in ", call, " on cuda:", device_.id().index,
               ": NCCL has not connected the ranks. Look at the output of all ranks, with NCCL_DEBUG=INFO, or raise "
               "comm.timeout_ms, now ",
               timeout.count(), ".");
      std::this_thread::sleep_for(kPoll);
      lock.lock();
      ZC_CHECK(comm_ != nullptr, kComm, "[cuda] the NCCL communicator was aborted");
    }
    ZC_CHECK(result == NcclApi::kSuccess, kComm, "[cuda] ", text_of(call, result),
             ". Look at the output of all ranks, with NCCL_DEBUG=INFO.");
  }

  // Under the lock, or alone.
  void end(bool in_order) {
    if (comm_ == nullptr) return;
    const OnDevice on(device_.runtime(), device_.id().index);
    if (in_order && finalized()) {
      api_.comm_destroy(comm_);
    } else {
      api_.comm_abort(comm_);
    }
    comm_ = nullptr;
  }

  bool finalized() {
    int state = api_.comm_finalize(comm_);
    const auto deadline = Clock::now() + kFinalizePatience;
    while (state == NcclApi::kInProgress && Clock::now() < deadline) {
      std::this_thread::sleep_for(kPoll);
      if (api_.comm_get_async_error(comm_, &state) != NcclApi::kSuccess) return false;
    }
    return state == NcclApi::kSuccess;
  }

  const NcclApi& api_;
  CudaDevice& device_;
  std::mutex mutex_;
  NcclApi::Comm comm_ = nullptr;
};

class NcclGroup final : public Group {
 public:
  explicit NcclGroup(CudaDevice& device) : stream(device.make_stream()), before(device.make_event()) {}
  ~NcclGroup() override { drop_elsewhere(std::move(nccl)); }

  std::string error() override { return nccl != nullptr ? nccl->error() : ""; }
  void abort() noexcept override {
    try {
      if (nccl != nullptr) nccl->abort();
    } catch (...) {  // the device has failed: nothing runs on it
    }
  }

  std::shared_ptr<const device::Stream> stream;
  std::unique_ptr<device::Event> before;
  std::shared_ptr<NcclComm> nccl;  // null: one rank alone, whose collectives run on the caller's stream
  Memory staging;                  // what peers send goes there; in the order of the stream
  std::atomic<std::int64_t> staging_bytes{0};
};

class NcclCommunicator final : public OverHost {
 public:
  // in_flight: the rank's; null: this is the communicator of all ranks. Collective over host.
  NcclCommunicator(std::shared_ptr<comm::Communicator> host, CudaDevice& device, const NcclApi* api,
                   NcclOptions options, std::shared_ptr<InFlight> in_flight)
      : OverHost(std::move(host), device),
        api_(api),
        options_(options),
        in_flight_(in_flight != nullptr ? std::move(in_flight) : std::make_shared<InFlight>(host_)),
        group_(std::make_shared<NcclGroup>(device)) {
    if (size() > 1) connect();
    in_flight_->join(group_);
  }
  ~NcclCommunicator() override { drop_elsewhere(std::move(group_)); }

  const char* backend() const override { return "nccl"; }
  std::int64_t staging_bytes() const override { return group_->staging_bytes; }
  std::string failure() const override {
    const std::string reason = in_flight_->failure();
    return reason.empty() ? host_->failure() : reason;
  }

 private:
  Work run_on_device(const Call& call) override {
    in_flight_->check();
    Work meeting = meet_for(call);
    auto state = std::make_shared<Work::State>();
    state->event = device_.make_event();
    state->driver = in_flight_;
    state->meeting = meeting.state();
    try {
      const device::Stream stream = size() > 1 ? *group_->stream : call.after;
      if (size() > 1) {
        group_->before->record(call.after);
        group_->before->order(stream);
      }
      if (call.in.numel > 0) move(call, stream);
      state->event->record(stream);
    } catch (const Error& error) {
      in_flight_->fail(concat(error.what(), " It was in ", label_of(call), "."), true);
      in_flight_->check();
    }
    in_flight_->add(group_, {state, std::move(meeting), group_->staging, label_of(call), timeout()});
    return Work(std::move(state));
  }

  Work meet_for(const Call& call) {
    Work meeting = host_->meet(call);
    try {
      meeting.wait_for(std::chrono::milliseconds(0));  // throws when it has failed at once
      return meeting;
    } catch (const Error& error) {
      in_flight_->fail(error.what(), false);
      throw;
    }
  }

  std::shared_ptr<comm::Communicator> run_split(const Call&, int color, int key) override {
    in_flight_->check();
    return std::make_shared<NcclCommunicator>(split_host(color, key), device_, api_, options_, in_flight_);
  }

  static std::string label_of(const Call& call) { return concat(comm::name(call.op), " \"", call.label, "\""); }

  // One rank's end of the group's NCCL communicator. All ranks succeed, or none does.
  void connect() {
    ZC_CHECK(api_ != nullptr, kInternal, "[cuda] ", size(), " ranks without NCCL");
    struct Start {
      NcclApi::UniqueId id;
      int result;
    } start{};
    if (rank() == 0) {
      const OnDevice on(device_.runtime(), device_.id().index);
      start.result = api_->get_unique_id(&start.id);
    }
    host_->broadcast({&start, sizeof start, DType::kU8, {}}, 0, "identity of an NCCL communicator").wait();
    ZC_CHECK(start.result == NcclApi::kSuccess, kComm, "[cuda] rank 0 of the group got no identity from NCCL: \"",
             api_->get_error_string(start.result), "\" for ncclGetUniqueId. Look at its output, with NCCL_DEBUG=INFO.");
    try {
      group_->nccl =
          std::make_shared<NcclComm>(*api_, device_, start.id, size(), rank(), timeout(), [this] { return reason(); });
    } catch (const Error& error) {
      in_flight_->fail(error.what(), true);
      throw;
    }
    host_->barrier("all ranks are connected by NCCL").wait();
  }

  // Why to stop waiting for NCCL. A peer that has failed may have done its part before; and if not, the guard says best
  // what all ranks were doing.
  std::string reason() {
    const auto now = Clock::now();
    if (now - looked_for_failures_ > kLookForFailures) {
      looked_for_failures_ = now;
      host_->look_for_failures();
    }
    std::string reason = in_flight_->failure();
    if (!reason.empty()) return reason;
    reason = host_->failure();
    if (reason.empty()) return {};
    if (!peer_failed_) peer_failed_ = now;
    return now - *peer_failed_ > kPeerFailedPatience ? reason : "";
  }

  void move(const Call& call, device::Stream stream) {
    const BufferView& in = call.in;
    const BufferView& out = call.out;
    if (size() == 1) {
      if (call.op == Op::kReduceScatterAdd) {
        const void* const source = in.data;
        device::fold(device_.kernels(), {&source, 1}, in.dtype, out, call.first, stream);
      } else if (call.op == Op::kAllGather && in.data != out.data) {
        device_.copy(in, out, stream);
      }
      return;
    }
    const auto bytes = static_cast<std::size_t>(in.bytes());
    switch (call.op) {
      case Op::kReduceScatterAdd:
        reduce_scatter_add(in, out, call.first, stream);
        break;
      case Op::kAllGather:
        run([&](NcclApi::Comm comm, auto note) {
          note("ncclAllGather", api_->all_gather(in.data, out.data, bytes, NcclApi::kUint8, comm, stream.handle));
        });
        break;
      case Op::kBroadcast:
        run([&](NcclApi::Comm comm, auto note) {
          note("ncclBroadcast",
               api_->broadcast(in.data, out.data, bytes, NcclApi::kUint8, call.root, comm, stream.handle));
        });
        break;
      case Op::kAllReduce:
        run([&](NcclApi::Comm comm, auto note) {
          const int op = call.reduce == comm::ReduceOp::kSum ? NcclApi::kSum : NcclApi::kMax;
          note("ncclAllReduce", api_->all_reduce(in.data, out.data, static_cast<std::size_t>(in.numel), NcclApi::kInt64,
                                                 op, comm, stream.handle));
        });
        break;
      default:
        fail(ErrorKind::kInternal, "[cuda] ", comm::name(call.op), " of device memory");
    }
  }

  void reduce_scatter_add(const BufferView& bucket, const BufferView& shard, bool first, device::Stream stream) {
    const BufferView own = bucket.slice(rank() * shard.numel, shard.numel);
    if (options_.fast) {
      std::byte* const sum = staging(own.bytes());
      run([&](NcclApi::Comm comm, auto note) {
        note("ncclReduceScatter", api_->reduce_scatter(bucket.data, sum, static_cast<std::size_t>(shard.numel),
                                                       nccl_type(bucket.dtype), NcclApi::kSum, comm, stream.handle));
      });
      const void* const source = sum;
      return device::fold(device_.kernels(), {&source, 1}, bucket.dtype, shard, first, stream);
    }
    std::byte* const received = staging((size() - 1) * own.bytes());
    const auto bytes = static_cast<std::size_t>(own.bytes());
    sources_.resize(static_cast<std::size_t>(size()));
    for (int peer = 0, at = 0; peer < size(); ++peer) {
      sources_[static_cast<std::size_t>(peer)] = peer == rank() ? own.data : received + at++ * own.bytes();
    }
    run([&](NcclApi::Comm comm, auto note) {
      for (int step = 1; step < size(); ++step) {  // not all to one rank at once
        const int to = (rank() + step) % size(), from = (rank() + size() - step) % size();
        const void* const slice = bucket.slice(to * shard.numel, shard.numel).data;
        void* const slot = const_cast<void*>(sources_[static_cast<std::size_t>(from)]);
        note("ncclSend", api_->send(slice, bytes, NcclApi::kUint8, to, comm, stream.handle));
        note("ncclRecv", api_->recv(slot, bytes, NcclApi::kUint8, from, comm, stream.handle));
      }
    });
    device::fold(device_.kernels(), sources_, bucket.dtype, shard, first, stream);
  }

  template <class Body>
  void run(Body body) {
    group_->nccl->run(timeout(), [this] { return reason(); }, body);
  }

  // Collectives in flight hold the memory that they were given.
  std::byte* staging(std::int64_t bytes) {
    if (bytes > group_->staging_bytes) {
      drop_elsewhere(std::exchange(group_->staging, device_.allocate(bytes)));
      group_->staging_bytes = bytes;
    }
    return group_->staging.get();
  }

  const NcclApi* api_;
  NcclOptions options_;
  std::shared_ptr<InFlight> in_flight_;
  std::shared_ptr<NcclGroup> group_;
  std::vector<const void*> sources_;  // reused
  Clock::time_point looked_for_failures_{};
  std::optional<Clock::time_point> peer_failed_{};  // when that was seen first
};

}  // namespace

std::shared_ptr<comm::Communicator> make_nccl_communicator(std::shared_ptr<comm::Communicator> host, CudaDevice& device,
                                                           const NcclApi* api, NcclOptions options) {
  return std::make_shared<NcclCommunicator>(std::move(host), device, api, options, nullptr);
}

bool ranks_share_a_device(comm::Communicator& host, CudaDevice& device) {
  std::array<char, 64> own{};
  const std::string text = device.runtime().device_id(device.id().index);
  text.copy(own.data(), own.size());
  std::vector<std::array<char, 64>> all(static_cast<std::size_t>(host.size()));
  host.gather_bytes(std::as_bytes(std::span(own)), std::as_writable_bytes(std::span(all)), "devices of ranks").wait();
  std::ranges::sort(all);
  return std::ranges::adjacent_find(all) != all.end();
}

std::shared_ptr<comm::Communicator> make_device_communicator(std::shared_ptr<comm::Communicator> host,
                                                             CudaDevice& device, const std::string& nccl_path,
                                                             NcclOptions options) {
  if (host->size() == 1) return make_nccl_communicator(std::move(host), device, nullptr, options);
  if (ranks_share_a_device(*host, device)) return make_staged_communicator(std::move(host), device);
  return make_nccl_communicator(std::move(host), device, &load_nccl(nccl_path), options);
}

}  // namespace zc::cuda
