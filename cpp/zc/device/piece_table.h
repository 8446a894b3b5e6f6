// Pieces that are prepared once for the kernels of a device.
#pragma once

#include <vector>

#include "zc/device/device.h"

namespace zc::device {

class PieceTable {
 public:
  PieceTable() = default;

  // Blocks where the device runs behind: its chunks are copied to its memory.
  PieceTable(Device& device, std::vector<Piece> pieces);

  operator Pieces() const {  // NOLINT: it is pieces; valid while the table lives
    Pieces pieces(list_);
    pieces.chunks = reinterpret_cast<const Chunk*>(chunks_.get());
    pieces.num_chunks = num_chunks_;
    return pieces;
  }
  const std::vector<Piece>& list() const { return list_; }

 private:
  std::vector<Piece> list_;
  Memory chunks_;
  std::int64_t num_chunks_ = 0;
};

// What a device that runs behind needs; the others get by with the list.
std::vector<Chunk> chunks_of(std::span<const Piece> pieces);

}  // namespace zc::device
