#include "zc/comm/collectives.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "zc/base/error.h"
#include "zc/device/kernels.h"

namespace zc::comm {
namespace {

// Messages that are received into staging: small enough that a piece is folded from cache while the next one comes.
constexpr std::int64_t kStagedPieceBytes = std::int64_t{1} << 18;
// Messages that are received in place, and what is read in place before other communicators get their turn.
constexpr std::int64_t kPieceBytes = std::int64_t{16} << 20;

// Pieces alternate between two slots, each with a lane for what comes and one for what goes.
std::size_t receives(std::int64_t piece) { return static_cast<std::size_t>(piece & 1); }
std::size_t sends(std::int64_t piece) { return 2 + static_cast<std::size_t>(piece & 1); }

void combine(std::int64_t& into, std::int64_t value, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      into = static_cast<std::int64_t>(static_cast<std::uint64_t>(into) + static_cast<std::uint64_t>(value));
      break;
    case ReduceOp::kMax:
      into = std::max(into, value);
      break;
    case ReduceOp::kBitOr:
      into |= value;
      break;
  }
}

}  // namespace

Task Collectives::execute(const Operation& operation, Work::State& state) {
  const Endpoint::CallId call{context_, operation.header.sequence};
  try {
    endpoint_.enter(call);
    co_await run(operation, state);
    endpoint_.finish(call);
    state.complete();
  } catch (const Error& error) {
    give_up(operation, error, state);
  } catch (const std::exception& error) {
    give_up(operation, Error(ErrorKind::kInternal, concat("[comm] ", error.what())), state);
  }
}

void Collectives::give_up(const Operation& operation, const Error& error, Work::State& state) noexcept {
  // First the news: giving transfers up may take a while.
  const std::string text =
      endpoint_.give_up({context_, operation.header.sequence}, error.what(), guard_.also_failing());
  guard_.cancel_all();
  state.complete(Error(error.kind(), text));
}

Task Collectives::run(const Operation& operation, Work::State& state) {
  const BufferView& in = operation.in;
  const BufferView& out = operation.out;
  const Op op = operation.header.op;
  if (operation.meets_only) {
    co_await guard_.meet(operation.header, {}, operation.timeout, false);
    state.turn = guard_.latest_turn();
    co_return;
  }
  const bool may_ride = op == Op::kAllReduce || op == Op::kGatherBytes || op == Op::kSplit || op == Op::kBarrier;
  const bool rides = may_ride && in.bytes() <= static_cast<std::int64_t>(kInlineBytes);
  const std::span payload(in.as<const std::byte>(), static_cast<std::size_t>(rides ? in.bytes() : 0));
  CallHeader header = operation.header;
  if (!may_ride) header.place = endpoint_.transport().locate(in.data, in.bytes());
  co_await guard_.meet(header, payload, operation.timeout, !rides);
  switch (op) {
    case Op::kReduceScatterAdd:
      co_await reduce_scatter_add(in, out, operation.first);
      break;
    case Op::kAllGather:
      co_await gather(in, out.as<std::byte>());
      break;
    case Op::kBroadcast:
      co_await broadcast(out, operation.header.root);
      break;
    case Op::kAllReduce:
      co_await all_reduce(out, operation.header.reduce, rides);
      break;
    case Op::kGatherBytes:
    case Op::kSplit:
      co_await gather_bytes(in, out.as<std::byte>(), rides);
      break;
    case Op::kBarrier:
      break;
  }
}

bool Collectives::all_have_places() const {
  for (int rank = 0; rank < guard_.size(); ++rank) {
    if (!guard_.has_place(rank)) return false;
  }
  return true;
}

// Calls read(offset, count) for `bytes` in pieces, with the memory of member `from`, or of all others, at mapped_. Ends
// when all who read this rank's memory have done so, since it is the caller's again then.
template <class Read>
Task Collectives::read_in_place(int from, std::int64_t bytes, Read read) {
  mapped_.assign(static_cast<std::size_t>(guard_.size()), nullptr);
  co_await guard_.map(&mapped_, from);
  for (std::int64_t offset = 0; offset < bytes; offset += kPieceBytes) {
    if (offset > 0) co_await guard_.give_way();
    read(offset, std::min(kPieceBytes, bytes - offset));
  }
  guard_.check_peers();  // one that has given up may have freed what was read
  for (int rank = 0; rank < guard_.size(); ++rank) {
    if (rank == guard_.index()) continue;
    if (from == Guard::kAll || from == guard_.index()) guard_.receive(receives(0), rank, nullptr, 0);
    if (from == Guard::kAll || from == rank) guard_.send(sends(0), rank, nullptr, 0);
  }
  co_await guard_.wait(sends(0));
  co_await guard_.wait(receives(0), false);
}

// Every rank sends source(peer) to each peer and receives target(peer, slot) from each, `bytes` long, in pieces;
// consume(offset, count, slot) is called for each piece, in order, while the next one is under way.
template <class Source, class Target, class Consume>
Task Collectives::exchange(std::int64_t bytes, std::int64_t piece_bytes, Source source, Target target,
                           Consume consume) {
  const std::int64_t num_pieces = (bytes + piece_bytes - 1) / piece_bytes;
  const auto count = [&](std::int64_t piece) { return std::min(piece_bytes, bytes - piece * piece_bytes); };
  const auto start = [&](std::int64_t piece) {
    for (int step = 1; step < guard_.size(); ++step) {
      const int from = (guard_.index() + guard_.size() - step) % guard_.size();
      guard_.receive(receives(piece), from, target(from, piece & 1, piece * piece_bytes), count(piece));
    }
    for (int step = 1; step < guard_.size(); ++step) {
      const int to = (guard_.index() + step) % guard_.size();
      guard_.send(sends(piece), to, source(to) + piece * piece_bytes, count(piece));
    }
  };
  if (num_pieces > 0) start(0);
  for (std::int64_t piece = 0; piece < num_pieces; ++piece) {
    if (piece + 1 < num_pieces) {
      co_await guard_.wait(sends(piece + 1));
      start(piece + 1);
    }
    co_await guard_.wait(receives(piece));
    consume(piece * piece_bytes, count(piece), piece & 1);
  }
  co_await guard_.wait(sends(0));
  co_await guard_.wait(sends(1));
}

Task Collectives::reduce_scatter_add(const BufferView& bucket, const BufferView& shard, bool first) {
  auto* data = bucket.as<std::byte>();
  const std::int64_t element = size_bytes(bucket.dtype);
  const std::int64_t bytes = shard.numel * element;
  std::vector<const void*> sources(static_cast<std::size_t>(guard_.size()));
  if (all_have_places()) {
    const auto fold_pieces = [&](std::int64_t offset, std::int64_t count) {
      for (int rank = 0; rank < guard_.size(); ++rank) {
        const auto at = static_cast<std::size_t>(rank);
        sources[at] = (rank == guard_.index() ? data : mapped_[at]) + guard_.index() * bytes + offset;
      }
      device::fold(device::cpu_kernels(), sources, bucket.dtype, shard.slice(offset / element, count / element), first,
                   {});
    };
    co_await read_in_place(Guard::kAll, bytes, fold_pieces);
    co_return;
  }
  const auto source = [&](int peer) { return data + peer * bytes; };
  const auto target = [&](int peer, std::int64_t slot, std::int64_t) { return staging(slot, peer); };
  const auto fold = [&](std::int64_t offset, std::int64_t count, std::int64_t slot) {
    for (int rank = 0; rank < guard_.size(); ++rank) {
      sources[static_cast<std::size_t>(rank)] =
          rank == guard_.index() ? data + rank * bytes + offset : staging(slot, rank);
    }
    device::fold(device::cpu_kernels(), sources, bucket.dtype, shard.slice(offset / element, count / element), first,
                 {});
  };
  co_await exchange(bytes, kStagedPieceBytes, source, target, fold);
}

// `in` is sent from where it is, and copied to slice index() of `out` unless it is that slice.
Task Collectives::gather(const BufferView& in, std::byte* out) {
  const auto* data = in.as<const std::byte>();
  const std::int64_t bytes = in.bytes();
  std::byte* const own = out + guard_.index() * bytes;
  if (all_have_places()) {
    const auto copy = [&](std::int64_t offset, std::int64_t count) {
      for (int step = 0; step < guard_.size(); ++step) {  // not all from one rank at once
        const int rank = (guard_.index() + step) % guard_.size();
        const std::byte* const from = step == 0 ? data : mapped_[static_cast<std::size_t>(rank)];
        std::byte* const to = out + rank * bytes;
        if (from != to) std::memcpy(to + offset, from + offset, static_cast<std::size_t>(count));
      }
    };
    co_await read_in_place(Guard::kAll, bytes, copy);
    co_return;
  }
  const auto source = [&](int) { return data; };
  const auto target = [&](int peer, std::int64_t, std::int64_t offset) { return out + peer * bytes + offset; };
  const auto copy_own = [&](std::int64_t offset, std::int64_t count, std::int64_t) {
    if (data != own) std::memcpy(own + offset, data + offset, static_cast<std::size_t>(count));
  };
  co_await exchange(bytes, kPieceBytes, source, target, copy_own);
}

Task Collectives::gather_bytes(const BufferView& in, std::byte* out, bool rides) {
  if (!rides) {
    co_await gather(in, out);
    co_return;
  }
  const auto bytes = static_cast<std::size_t>(in.bytes());
  if (bytes == 0) co_return;
  for (int rank = 0; rank < guard_.size(); ++rank) std::memcpy(out + rank * in.bytes(), guard_.payload(rank), bytes);
}

Task Collectives::all_reduce(const BufferView& view, ReduceOp op, bool rides) {
  auto* values = view.as<std::int64_t>();
  const auto add = [&](const std::byte* theirs, std::int64_t first, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
      std::int64_t value;
      std::memcpy(&value, theirs + i * 8, sizeof value);
      combine(values[first + i], value, op);
    }
  };
  const auto add_all = [&](const auto& from, std::int64_t first, std::int64_t count) {
    for (int rank = 0; rank < guard_.size(); ++rank) {
      if (rank != guard_.index()) add(from(rank), first, count);
    }
  };
  if (rides) {
    add_all([&](int rank) { return guard_.payload(rank); }, 0, view.numel);
    co_return;
  }
  const std::vector<std::int64_t> own(values, values + view.numel);  // peers read it while `values` changes
  const auto source = [&](int) { return reinterpret_cast<const std::byte*>(own.data()); };
  const auto target = [&](int peer, std::int64_t slot, std::int64_t) { return staging(slot, peer); };
  const auto add_pieces = [&](std::int64_t offset, std::int64_t count, std::int64_t slot) {
    add_all([&](int rank) { return staging(slot, rank); }, offset / 8, count / 8);
  };
  co_await exchange(view.bytes(), kStagedPieceBytes, source, target, add_pieces);
}

// A binomial tree over the ranks counted from root: rank v hears from v without its lowest set bit.
Task Collectives::broadcast(const BufferView& view, int root) {
  const int size = guard_.size();
  const int relative = (guard_.index() - root + size) % size;
  const auto member = [&](int r) { return (r + root) % size; };
  const int reach = relative == 0 ? size : relative & -relative;  // children are below this distance
  auto* data = view.as<std::byte>();
  if (guard_.has_place(root)) {
    const auto copy = [&](std::int64_t offset, std::int64_t count) {
      std::memcpy(data + offset, mapped_[static_cast<std::size_t>(root)] + offset, static_cast<std::size_t>(count));
    };
    co_await read_in_place(root, relative == 0 ? 0 : view.bytes(), copy);
    co_return;
  }
  const std::int64_t num_pieces = (view.bytes() + kPieceBytes - 1) / kPieceBytes;
  const auto count = [&](std::int64_t piece) { return std::min(kPieceBytes, view.bytes() - piece * kPieceBytes); };
  const auto listen = [&](std::int64_t piece) {
    if (relative == 0 || piece >= num_pieces) return;
    guard_.receive(receives(piece), member(relative - reach), data + piece * kPieceBytes, count(piece));
  };
  listen(0);
  for (std::int64_t piece = 0; piece < num_pieces; ++piece) {
    listen(piece + 1);
    co_await guard_.wait(receives(piece));
    co_await guard_.wait(sends(piece));
    for (int distance = 1; distance < reach && relative + distance < size; distance *= 2) {
      guard_.send(sends(piece), member(relative + distance), data + piece * kPieceBytes, count(piece));
    }
  }
  co_await guard_.wait(sends(0));
  co_await guard_.wait(sends(1));
}

std::byte* Collectives::staging(std::int64_t slot, int peer) {
  const std::int64_t num_slots = 2 * (guard_.size() - 1);
  if (!staging_) {
    staging_ = allocate_host(num_slots * kStagedPieceBytes);
    staging_bytes_ = num_slots * kStagedPieceBytes;
  }
  const int place = peer < guard_.index() ? peer : peer - 1;
  return staging_.get() + (slot * (guard_.size() - 1) + place) * kStagedPieceBytes;
}

}  // namespace zc::comm
