// Takes gradients as backward produces them and folds them, bucket by bucket, into the accumulators.
//
// Note: one arrival rule. Within a micro-step a parameter's gradient may arrive several times (several backwards); the
// framework sums arrivals in the gradient's own dtype, and that sum is folded once. The first micro-step records how
// often each parameter arrives and in which order buckets complete, and launches buckets at its end, in the order of
// their numbers; then ranks agree on the maximum and on rank 0's order. From then on a bucket is launched as soon as
// its parameters have arrived as often as recorded, always in the recorded order; end_micro_step() launches the rest.
// So every bucket is launched exactly once a micro-step on every rank, used or not, whatever branch a rank took. An
// arrival after its bucket's launch is late: ranks learn of it in the exchange that ends the micro-step, one extra
// round of launches carries it, and the next micro-step records anew.
//
// Note: memory. While it records, a rank holds all its gradients. One that has no room for them (set_hold_bytes)
// launches buckets whose parameters have all arrived, as if each arrived once: right in most models, and late
// otherwise.
//
// Note: who may wait. A launch waits for a free bucket buffer, that is for peers to launch an earlier bucket, which
// they may do at the end of the micro-step only, when they use other parameters. That is harmless as long as peers do
// not wait for this rank meanwhile. Where parameters are gathered during the backward they do; there a launch that
// finds no buffer free is put off to a later arrival, or to the end of the micro-step. On a device that runs behind it
// is the streams that wait: a buffer will do from which all ranks have launched, none behind a gather that this rank
// has not yet started (Work::may_wait).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "zc/comm/communicator.h"
#include "zc/device/device.h"
#include "zc/zero/bucket.h"

namespace zc::zero {

class GradReducer {
 public:
  // buckets: of `layout`, with grad_shard set where they are trainable; must outlive the reducer. dtype: what gradients
  // are rounded to on their way. num_buffers: bucket buffers in the pool; one is filled while the others are in flight.
  // Each takes the memory of the largest bucket at its first launch, and keeps it. With one rank there is no pool:
  // gradients are folded from where they lie. owner: keeps the accumulators' memory alive; every reduction in flight
  // holds it. gathers: where parameters are gathered during the backward, see above; null: nowhere.
  GradReducer(std::shared_ptr<comm::Communicator> comm, device::Device& device, const ShardLayout& layout,
              std::span<const Bucket> buckets, DType dtype, int num_buffers, std::shared_ptr<void> owner,
              std::shared_ptr<comm::Communicator> gathers);

  // What the caller's kernels run on: gradients are ready in its order, and may be freed in its order.
  void set_stream(device::Stream stream) { stream_ = stream; }

  std::int64_t pool_bytes() const;  // held now
  std::int64_t most_pool_bytes() const;

  // The gradients that this rank may hold while it records. It need not be the same on all ranks.
  void set_hold_bytes(std::int64_t bytes) { hold_bytes_ = bytes; }

  // Begins a micro-step. has_micro_batch false: this rank joins every collective with zeros, and its arrivals count as
  // unused. Throws kInternal when one is open.
  void begin_micro_step(bool has_micro_batch);
  bool in_micro_step() const { return open_; }

  // A gradient has arrived (or grew): `grad` holds the sum of this micro-step's arrivals that have not been launched.
  // The memory must stay as it is until the parameter's bucket is launched. Returns the buckets launched by this call:
  // their gradients have been copied and may be freed. The span is valid until the next call. may_launch false: only
  // notes the arrival; when one backward serves several engines, launching from its hooks would let ranks launch in
  // other orders.
  std::span<const int> ready(int param, BufferView grad, bool may_launch = true);

  // Launches what is left and exchanges usage. All gradients have been copied on return. Returns the parameters with a
  // late arrival on any rank (empty in a correct run). Collective.
  std::vector<int> end_micro_step();

  // Waits until every launched bucket is in the accumulators; on a device that runs behind the stream waits.
  void wait();

  // used[param] is 1 when any rank with a micro-batch has used it since the last reset.
  std::span<const std::uint8_t> used() const { return used_; }

  // The parameter has been given a gradient that no micro-batch has brought. On all ranks alike.
  void mark_used(int param) { used_[static_cast<std::size_t>(param)] = 1; }

  // Begins a new sum: no parameter is used, and accumulators count as +0 whatever they hold. The first reduction of a
  // bucket writes over what is there, so nobody makes a pass over memory to zero it.
  void reset();

  // Whether something was folded into a bucket's accumulator since the last reset: else it holds nothing.
  bool folded(int bucket) const { return folded_[static_cast<std::size_t>(bucket)] != 0; }

  // Makes a bucket's accumulator hold what it counts as, for those who read it or write to a part of it. After wait().
  void settle(int bucket);

 private:
  bool may_launch_next();
  std::int64_t num_gathers() const;  // started
  void launch(int bucket, bool late_only);
  void agree_on_record();
  std::vector<int> exchange_usage();

  std::shared_ptr<comm::Communicator> comm_;
  device::Device& device_;
  const ShardLayout& layout_;
  std::span<const Bucket> buckets_;
  DType dtype_;
  std::shared_ptr<void> owner_;
  std::vector<std::string> labels_;

  struct Buffer {
    Memory memory{};
    comm::Work work{};
    std::string_view label{};  // of what is in it
  };
  std::vector<Buffer> pool_;
  std::size_t next_buffer_ = 0;
  std::shared_ptr<comm::Communicator> gathers_;
  bool was_patient_ = false;        // the next launch has waited as long as it may
  std::int64_t largest_bytes_ = 0;  // of a bucket
  device::Stream stream_;
  std::vector<device::Part> parts_;  // of the bucket that is launched; reused

  bool open_ = false;
  bool recording_ = true;
  bool has_micro_batch_ = true;
  std::vector<std::int64_t> expected_;  // arrivals a parameter, as recorded
  std::vector<int> order_;              // trainable buckets, as recorded
  std::vector<std::int64_t> arrivals_;  // in this micro-step
  std::vector<BufferView> grads_;       // not launched yet; data null when none
  std::vector<std::uint8_t> late_;
  std::int64_t hold_bytes_ = INT64_MAX;
  std::int64_t held_bytes_ = 0;
  std::vector<int> missing_;  // parameters a bucket still waits for
  std::vector<std::uint8_t> launched_;
  std::vector<std::uint8_t> folded_;  // since the last reset, a bucket
  std::size_t next_in_order_ = 0;
  std::int64_t clock_ = 0;
  std::vector<std::int64_t> last_arrival_;  // of a bucket, on clock_
  std::vector<int> just_launched_;
  std::vector<std::uint8_t> used_here_;  // by this rank in this micro-step
  std::vector<std::uint8_t> used_;       // by any rank in this step
  std::vector<std::int64_t> exchange_;   // bit sets that travel
};

}  // namespace zc::zero
