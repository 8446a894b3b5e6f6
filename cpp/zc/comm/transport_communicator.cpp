#include "zc/comm/transport_communicator.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <optional>
#include <thread>
#include <vector>

#include "zc/base/error.h"
#include "zc/comm/collectives.h"
#include "zc/comm/endpoint.h"

namespace zc::comm {
namespace {

class TransportCommunicator final : public Communicator {
 public:
  TransportCommunicator(std::shared_ptr<Endpoint> endpoint, std::vector<int> ranks, int index, int context,
                        Options options)
      : Communicator(index, static_cast<int>(ranks.size()), options),
        endpoint_(std::move(endpoint)),
        ranks_(std::move(ranks)),
        context_(context),
        collectives_(std::make_shared<Collectives>(*endpoint_, ranks_, index, context)) {}

  Memory allocate(std::int64_t bytes) override {
    Memory memory = endpoint_->transport().allocate(bytes);
    return memory != nullptr ? memory : Communicator::allocate(bytes);
  }

  Memory allocate_shared(std::int64_t bytes, std::string_view label) override {
    std::uint32_t number = 0;
    Memory memory;
    std::optional<Error> failure;
    if (rank() == 0) {
      std::vector<int> peers(ranks_.begin() + 1, ranks_.end());
      try {
        memory = endpoint_->transport().share(std::max<std::int64_t>(bytes, 1), peers, &number);
      } catch (const Error& error) {
        failure = error;  // told to all, below
      }
    }
    struct Offer {
      std::uint32_t number;
      std::uint32_t failed;
    };
    const Offer own{number, failure.has_value()};
    std::vector<Offer> all(static_cast<std::size_t>(size()));
    gather_bytes(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)), label).wait();
    if (failure) throw *failure;
    ZC_CHECK(!all[0].failed, kDevice, "[comm] rank ", ranks_[0], " got no ", bytes,
             " bytes of memory for all ranks. Look at its error.");
    if (all[0].number == 0) return Communicator::allocate_shared(bytes, label);
    const auto deadline = std::chrono::steady_clock::now() + timeout();
    while (memory == nullptr) {
      memory = endpoint_->transport().adopt(ranks_[0], all[0].number);
      if (memory != nullptr) break;
      ZC_CHECK(std::chrono::steady_clock::now() < deadline, kComm, "[comm] timed out after ", timeout().count(),
               " ms: memory that rank ", ranks_[0], " shares has not arrived. Look at the output of that rank.");
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return memory;
  }

  const char* backend() const override { return endpoint_->transport().name(); }
  void set_activity(std::string_view activity) override { endpoint_->set_activity(activity); }
  std::string failure() const override { return endpoint_->failure(); }
  void look_for_failures() override { endpoint_->look_for_failures(); }
  void announce_failure(const std::string& reason) noexcept override { endpoint_->announce_failure(reason); }
  std::int64_t staging_bytes() const override { return collectives_->staging_bytes(); }

  std::string watch_processes() override {
    ZC_CHECK(size() == endpoint_->transport().size(), kInternal, "[comm] watch_processes over some of the ranks: got ",
             size(), ", expected ", endpoint_->transport().size());
    auto liveness = std::make_unique<Liveness>(rank(), size());
    std::vector<Liveness::Contact> all(static_cast<std::size_t>(size()));
    gather_bytes(std::as_bytes(std::span(&liveness->contact(), 1)), std::as_writable_bytes(std::span(all)),
                 "watch the ranks' processes")
        .wait();
    std::string reason = liveness->start(all);
    if (reason.empty()) endpoint_->watch(std::move(liveness));
    return reason;
  }

  void promise_place() override { endpoint_->promise_place(); }
  bool place_wanted() override { return endpoint_->place_wanted(); }
  void tell_place(std::string_view place) override { endpoint_->tell_place(place); }

  void leave(Departure departure, std::string_view reason, std::chrono::milliseconds grace) noexcept override {
    endpoint_->leave(departure, reason, grace);
  }

 private:
  Work run(const Call& call) override {
    endpoint_->check_process();
    Operation operation{
        .in = call.in, .out = call.out, .first = call.first, .meets_only = call.meets_only, .timeout = timeout()};
    CallHeader& header = operation.header;
    header.fingerprint = call.fingerprint;
    header.sequence = call.sequence;
    header.numel = call.numel();
    header.turn = call.turn;
    header.root = call.root;
    header.op = call.op;
    header.reduce = call.reduce;
    header.dtype = call.in.dtype;
    header.out_dtype = call.out.dtype;
    copy_text(endpoint_->activity(), header.activity);
    copy_text(call.label, header.label);
    auto state = std::make_shared<Work::State>();
    if (endpoint_->takes_help()) state->driver = endpoint_;
    endpoint_->post(context_,
                    [collectives = collectives_, operation, state] { return collectives->execute(operation, *state); });
    return Work(std::move(state));
  }

  std::shared_ptr<Communicator> run_split(const Call& call, int color, int key) override {
    struct Choice {
      int color, key, context;
    };
    const Choice own{color, key, endpoint_->next_context()};
    std::vector<Choice> all(static_cast<std::size_t>(size()));
    const std::int64_t bytes = sizeof own;
    Call exchange = call;
    exchange.in = {const_cast<Choice*>(&own), bytes, DType::kU8, {}};
    exchange.out = {all.data(), size() * bytes, DType::kU8, {}};
    run(exchange).wait();

    int context = 0;
    std::vector<int> members;  // by rank in this group
    for (int r = 0; r < size(); ++r) {
      const Choice& choice = all[static_cast<std::size_t>(r)];
      context = std::max(context, choice.context);
      if (choice.color == color) members.push_back(r);
    }
    std::ranges::stable_sort(members, {}, [&](int r) { return all[static_cast<std::size_t>(r)].key; });
    endpoint_->take_context(context);
    const auto index = static_cast<int>(std::ranges::find(members, rank()) - members.begin());
    for (int& member : members) member = ranks_[static_cast<std::size_t>(member)];
    return std::make_shared<TransportCommunicator>(endpoint_, std::move(members), index, context, Options{timeout()});
  }

  std::shared_ptr<Endpoint> endpoint_;
  std::vector<int> ranks_;
  int context_;
  std::shared_ptr<Collectives> collectives_;
};

}  // namespace

std::shared_ptr<Communicator> make_transport_communicator(std::unique_ptr<Transport> transport, Options options) {
  auto endpoint = Endpoint::open(std::move(transport));
  std::vector<int> ranks(static_cast<std::size_t>(endpoint->transport().size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  const int rank = endpoint->transport().rank();
  endpoint->take_context(1);
  return std::make_shared<TransportCommunicator>(std::move(endpoint), std::move(ranks), rank, 1, options);
}

}  // namespace zc::comm
