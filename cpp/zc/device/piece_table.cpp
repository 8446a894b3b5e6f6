#include "zc/device/piece_table.h"

#include <algorithm>

#include "zc/math/norm.h"

namespace zc::device {

std::vector<Chunk> chunks_of(std::span<const Piece> pieces) {
  std::vector<Chunk> chunks;
  for (const Piece& piece : pieces) {
    for (std::int64_t begin = 0; begin < piece.numel; begin += math::kBlockNumel) {
      const std::int64_t numel = std::min(math::kBlockNumel, piece.numel - begin);
      chunks.push_back({piece.offset + begin, static_cast<std::int32_t>(numel), piece.slot});
    }
  }
  return chunks;
}

PieceTable::PieceTable(Device& device, std::vector<Piece> pieces) : list_(std::move(pieces)) {
  if (!device.runs_behind()) return;
  std::vector<Chunk> chunks = chunks_of(list_);
  num_chunks_ = std::ssize(chunks);
  const std::int64_t bytes = num_chunks_ * static_cast<std::int64_t>(sizeof(Chunk));
  if (bytes == 0) return;
  chunks_ = device.allocate(bytes);
  device.copy({chunks.data(), bytes, DType::kU8, {}}, {chunks_.get(), bytes, DType::kU8, device.id()}, {});
  device.synchronize({});
}

}  // namespace zc::device
