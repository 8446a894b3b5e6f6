#include "cuda/fake_nccl.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "zc/base/error.h"
#include "zc/base/half.h"
#include "zc/device/kernels.h"

namespace zc::cuda {
namespace {

constexpr int kUnhandledError = 1;
constexpr int kInvalidUsage = 5;
constexpr int kRemoteError = 6;
constexpr int kPollsInProgress = 2;  // before calls are through

struct Op {
  enum Kind { kSend, kReceive, kAllGather, kReduceScatter, kAllReduce, kBroadcast } kind;
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::size_t count = 0;
  int type = 0;
  int peer = 0;  // or root
  int reduce = 0;
  friend bool alike(const Op& a, const Op& b) {
    return a.kind == b.kind && a.count == b.count && a.type == b.type && a.reduce == b.reduce &&
           (a.kind != kBroadcast || a.peer == b.peer);
  }
};

// What the ranks put on their streams as their call number k.
struct Round {
  std::shared_ptr<Rendezvous> rendezvous;
  std::vector<std::vector<Op>> ops;  // of each rank
  std::size_t num_called = 0;
};

struct World {
  int size = 0;
  int num_joined = 0;
  std::vector<std::shared_ptr<Round>> rounds{};
};

struct FakeComm {
  std::shared_ptr<World> world;
  int rank = 0;
  int device = 0;
  std::size_t num_calls = 0;
  int polls = 0;  // for which it is still in progress
  std::vector<Op> pending{};
  void* stream = nullptr;
};

struct State {
  Simulation& simulation;
  std::mutex mutex{};
  int next_id = 1;
  std::map<int, std::shared_ptr<World>> worlds{};
  std::set<FakeComm*> live{};
  std::set<int> failing{}, refusing{}, unconnectable{};
  int num_aborted = 0, num_connected = 0;
  std::mutex problems_mutex{};
  std::vector<std::string> problems{};
};

State* state = nullptr;

thread_local int group_depth = 0;
thread_local std::set<FakeComm*> group;

std::size_t size_of(int type) {
  switch (type) {
    case NcclApi::kUint8:
      return 1;
    case NcclApi::kInt64:
      return 8;
    case NcclApi::kF32:
      return 4;
    default:
      return 2;
  }
}

void problem(const std::string& text) {
  const std::lock_guard lock(state->problems_mutex);
  state->problems.push_back(text);
}

void touch(const Op& op, int size) {
  const auto bytes = static_cast<std::int64_t>(op.count * size_of(op.type));
  if (op.from != nullptr) {
    state->simulation.touches(op.from, op.kind == Op::kReduceScatter ? size * bytes : bytes, "NCCL reads");
  }
  if (op.to != nullptr) {
    state->simulation.touches(op.to, op.kind == Op::kAllGather ? size * bytes : bytes, "NCCL writes");
  }
}

using Bytes = std::vector<std::byte>;

Bytes read(const std::byte* from, std::size_t bytes) { return {from, from + bytes}; }

// From the last rank to the first: no order that anybody should count on.
Bytes sum_of(const std::vector<const Op*>& ops, std::size_t slice) {
  const Op& first = *ops[0];
  const std::size_t bytes = first.count * size_of(first.type);
  const auto numel = static_cast<std::int64_t>(first.count);
  const DType dtype = first.type == NcclApi::kF32   ? DType::kF32
                      : first.type == NcclApi::kF16 ? DType::kF16
                                                    : DType::kBF16;
  Bytes sum(bytes);
  for (std::size_t at = ops.size(); at-- > 0;) {
    const void* const source = ops[at]->from + slice * bytes;
    device::fold(device::cpu_kernels(), {&source, 1}, dtype, {sum.data(), numel, dtype, {}}, at + 1 == ops.size(), {});
  }
  return sum;
}

// All ranks' ops of one call, when all their streams have come to it. Everything is read before anything is written.
void carry_out(Round& round) {
  const std::size_t size = round.ops.size();
  std::vector<std::pair<std::byte*, Bytes>> writes;
  for (const auto& ops : round.ops) {
    for (const Op& op : ops) touch(op, static_cast<int>(size));
  }
  if (round.ops[0].front().kind == Op::kSend || round.ops[0].front().kind == Op::kReceive) {
    std::map<std::pair<std::size_t, std::size_t>, std::vector<const Op*>> sent;  // (from, to), in order
    for (std::size_t rank = 0; rank < size; ++rank) {
      for (const Op& op : round.ops[rank]) {
        if (op.kind == Op::kSend) sent[{rank, static_cast<std::size_t>(op.peer)}].push_back(&op);
      }
    }
    for (std::size_t rank = 0; rank < size; ++rank) {
      for (const Op& op : round.ops[rank]) {
        if (op.kind != Op::kReceive) continue;
        auto& queue = sent[{static_cast<std::size_t>(op.peer), rank}];
        if (queue.empty() || queue.front()->count != op.count) {
          problem("a receive without its send");
          return;
        }
        writes.emplace_back(op.to, read(queue.front()->from, op.count * size_of(op.type)));
        queue.erase(queue.begin());
      }
    }
  } else {
    std::vector<const Op*> ops;
    for (const auto& of_rank : round.ops) ops.push_back(&of_rank.front());
    const Op& first = *ops[0];
    const std::size_t bytes = first.count * size_of(first.type);
    for (std::size_t rank = 0; rank < size; ++rank) {
      std::byte* const to = ops[rank]->to;
      if (first.kind == Op::kBroadcast) {
        writes.emplace_back(to, read(ops[static_cast<std::size_t>(first.peer)]->from, bytes));
      } else if (first.kind == Op::kAllGather) {
        for (std::size_t from = 0; from < size; ++from) {
          writes.emplace_back(to + from * bytes, read(ops[from]->from, bytes));
        }
      } else if (first.kind == Op::kReduceScatter) {
        writes.emplace_back(to, sum_of(ops, rank));
      } else {
        Bytes result = read(first.from, bytes);
        for (std::size_t from = 1; from < size; ++from) {
          for (std::size_t i = 0; i < first.count; ++i) {
            std::int64_t value, mine;
            std::memcpy(&value, ops[from]->from + 8 * i, 8);
            std::memcpy(&mine, result.data() + 8 * i, 8);
            const auto sum = static_cast<std::uint64_t>(mine) + static_cast<std::uint64_t>(value);
            mine = first.reduce == NcclApi::kSum ? static_cast<std::int64_t>(sum) : std::max(mine, value);
            std::memcpy(result.data() + 8 * i, &mine, 8);
          }
        }
        writes.emplace_back(to, std::move(result));
      }
    }
  }
  for (const auto& [to, bytes] : writes) std::memcpy(to, bytes.data(), bytes.size());
}

// Ranks that call different things wait for each other for ever, as NCCL's may.
bool alike(const Round& round) {
  const auto kind = round.ops[0].front().kind;
  if (kind == Op::kSend || kind == Op::kReceive) {
    return std::ranges::all_of(
        round.ops, [](const auto& ops) { return ops.front().kind == Op::kSend || ops.front().kind == Op::kReceive; });
  }
  return std::ranges::all_of(
      round.ops, [&](const auto& ops) { return ops.size() == 1 && alike(ops.front(), round.ops[0].front()); });
}

// Puts what was called on the communicator's stream.
void launch(FakeComm& comm) {
  std::shared_ptr<Round> round;
  std::function<void()> run;
  {
    const std::lock_guard lock(state->mutex);
    World& world = *comm.world;
    if (comm.num_calls == world.rounds.size()) {
      const auto size = static_cast<std::size_t>(world.size);
      world.rounds.push_back(std::make_shared<Round>(
          Round{.rendezvous = std::make_shared<Rendezvous>(world.size), .ops = std::vector<std::vector<Op>>(size)}));
    }
    round = world.rounds[comm.num_calls++];
    round->ops[static_cast<std::size_t>(comm.rank)] = std::exchange(comm.pending, {});
    if (++round->num_called == round->ops.size() && alike(*round)) run = [at = round.get()] { carry_out(*at); };
    comm.polls = kPollsInProgress;
  }
  state->simulation.enqueue(comm.stream, round->rendezvous, comm.rank, std::move(run), round, "nccl");
}

int call(void* handle, void* stream, const Op& op) {
  auto& comm = *static_cast<FakeComm*>(handle);
  {
    const std::lock_guard lock(state->mutex);
    if (!state->live.contains(&comm)) return kInvalidUsage;
    if (comm.polls > 0) problem("a call while the last one is in progress");
    if (state->refusing.contains(comm.device)) return kUnhandledError;
  }
  comm.pending.push_back(op);
  comm.stream = stream;
  if (group_depth > 0) {
    group.insert(&comm);
  } else {
    launch(comm);
  }
  return NcclApi::kInProgress;
}

// --- The interface

int get_version(int* version) {
  *version = 22703;
  return NcclApi::kSuccess;
}

int get_unique_id(NcclApi::UniqueId* id) {
  const std::lock_guard lock(state->mutex);
  const int number = state->next_id++;
  std::memcpy(id->bytes, &number, sizeof number);
  return NcclApi::kSuccess;
}

int comm_init_rank_config(void** out, int size, NcclApi::UniqueId id, int rank, NcclApi::Config* config) {
  const std::lock_guard lock(state->mutex);
  if (config->magic != 0xcafebeef || config->size != 40 || config->blocking != 0) problem("a wrong configuration");
  const int device = state->simulation.current_device();
  if (state->unconnectable.contains(device)) return kUnhandledError;
  int number = 0;
  std::memcpy(&number, id.bytes, sizeof number);
  auto& world = state->worlds[number];
  if (!world) world = std::make_shared<World>(World{.size = size});
  ++world->num_joined;
  auto* comm = new FakeComm{.world = world, .rank = rank, .device = device};
  state->live.insert(comm);
  ++state->num_connected;
  *out = comm;
  return NcclApi::kInProgress;
}

int comm_get_async_error(void* handle, int* result) {
  auto& comm = *static_cast<FakeComm*>(handle);
  const std::lock_guard lock(state->mutex);
  if (!state->live.contains(&comm)) return kInvalidUsage;
  *result = NcclApi::kSuccess;
  if (state->failing.contains(comm.device)) {
    *result = kRemoteError;
  } else if (comm.world->num_joined < comm.world->size || comm.polls > 0) {
    if (comm.polls > 0) --comm.polls;
    *result = NcclApi::kInProgress;
  }
  return NcclApi::kSuccess;
}

int comm_finalize(void* handle) {
  auto& comm = *static_cast<FakeComm*>(handle);
  const std::lock_guard lock(state->mutex);
  comm.polls = kPollsInProgress;
  return NcclApi::kInProgress;
}

int end(void* handle, bool aborted) {
  auto* comm = static_cast<FakeComm*>(handle);
  std::vector<std::shared_ptr<Round>> rounds;
  {
    const std::lock_guard lock(state->mutex);
    if (state->live.erase(comm) == 0) {
      problem("a communicator ended twice");
      return kInvalidUsage;
    }
    if (aborted) ++state->num_aborted;
    rounds = comm->world->rounds;
  }
  if (aborted) {
    for (const auto& round : rounds) state->simulation.give_up(*round->rendezvous, comm->rank);
  }
  delete comm;
  return NcclApi::kSuccess;
}

int comm_destroy(void* comm) { return end(comm, false); }
int comm_abort(void* comm) { return end(comm, true); }

const char* get_error_string(int result) {
  return result == kRemoteError ? "remote process exited or there was a network error" : "unhandled cuda error";
}
const char* get_last_error(void*) { return "a fake failure"; }

int group_start() {
  ++group_depth;
  return NcclApi::kSuccess;
}
int group_end() {
  if (--group_depth > 0) return NcclApi::kSuccess;
  for (FakeComm* comm : std::exchange(group, {})) launch(*comm);
  return NcclApi::kInProgress;
}

std::byte* bytes(void* memory) { return static_cast<std::byte*>(memory); }
const std::byte* bytes(const void* memory) { return static_cast<const std::byte*>(memory); }

int send(const void* from, std::size_t count, int type, int peer, void* comm, void* stream) {
  return call(comm, stream, {.kind = Op::kSend, .from = bytes(from), .count = count, .type = type, .peer = peer});
}
int recv(void* to, std::size_t count, int type, int peer, void* comm, void* stream) {
  return call(comm, stream, {.kind = Op::kReceive, .to = bytes(to), .count = count, .type = type, .peer = peer});
}
int all_gather(const void* from, void* to, std::size_t count, int type, void* comm, void* stream) {
  return call(comm, stream,
              {.kind = Op::kAllGather, .from = bytes(from), .to = bytes(to), .count = count, .type = type});
}
int reduce_scatter(const void* from, void* to, std::size_t count, int type, int op, void* comm, void* stream) {
  return call(
      comm, stream,
      {.kind = Op::kReduceScatter, .from = bytes(from), .to = bytes(to), .count = count, .type = type, .reduce = op});
}
int all_reduce(const void* from, void* to, std::size_t count, int type, int op, void* comm, void* stream) {
  return call(
      comm, stream,
      {.kind = Op::kAllReduce, .from = bytes(from), .to = bytes(to), .count = count, .type = type, .reduce = op});
}
int broadcast(const void* from, void* to, std::size_t count, int type, int root, void* comm, void* stream) {
  return call(
      comm, stream,
      {.kind = Op::kBroadcast, .from = bytes(from), .to = bytes(to), .count = count, .type = type, .peer = root});
}

}  // namespace

FakeNccl::FakeNccl(Simulation& simulation) {
  if (state != nullptr) fail(ErrorKind::kInternal, "[simulation] two fakes of NCCL");
  state = new State{simulation};
  api_.get_version = get_version;
  api_.get_unique_id = get_unique_id;
  api_.comm_init_rank_config = comm_init_rank_config;
  api_.comm_finalize = comm_finalize;
  api_.comm_destroy = comm_destroy;
  api_.comm_abort = comm_abort;
  api_.comm_get_async_error = comm_get_async_error;
  api_.get_error_string = get_error_string;
  api_.get_last_error = get_last_error;
  api_.group_start = group_start;
  api_.group_end = group_end;
  api_.send = send;
  api_.recv = recv;
  api_.all_gather = all_gather;
  api_.reduce_scatter = reduce_scatter;
  api_.all_reduce = all_reduce;
  api_.broadcast = broadcast;
}

FakeNccl::~FakeNccl() { delete std::exchange(state, nullptr); }

namespace {
template <class Read>
auto locked(Read read) {
  const std::lock_guard lock(state->mutex);
  return read();
}
}  // namespace

void FakeNccl::fail_asynchronously(int device) {
  locked([&] { return state->failing.insert(device); });
}
void FakeNccl::refuse_calls(int device) {
  locked([&] { return state->refusing.insert(device); });
}
void FakeNccl::refuse_to_connect(int device) {
  locked([&] { return state->unconnectable.insert(device); });
}
int FakeNccl::num_live() const {
  return locked([] { return static_cast<int>(state->live.size()); });
}
int FakeNccl::num_aborted() const {
  return locked([] { return state->num_aborted; });
}
int FakeNccl::num_connected() const {
  return locked([] { return state->num_connected; });
}
std::vector<std::string> FakeNccl::problems() const {
  const std::lock_guard lock(state->problems_mutex);
  return state->problems;
}

}  // namespace zc::cuda
