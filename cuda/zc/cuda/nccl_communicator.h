// Collectives of a GPU's memory by NCCL, over ranks that another communicator connects.
//
// Each group has an NCCL communicator and a stream of its own. A collective is put on that stream when it is called,
// after what was on the caller's stream then, and the ranks meet for it under the guard of the host's communicator
// beside that: so mistakes and failures are named as ever, and nobody waits. Gradients are summed in rank order, by a
// kernel, from slices that NCCL only moves; Options::fast lets NCCL sum them instead, in an order of its own.
//
// Ranks that share a GPU, which NCCL does not allow, go through host memory: make_staged_communicator.
#pragma once

#include <memory>
#include <string>

#include "zc/comm/communicator.h"
#include "zc/cuda/cuda_device.h"
#include "zc/cuda/nccl_api.h"

namespace zc::cuda {

struct NcclOptions {
  bool fast = false;
};

// host: connects the same ranks. device: this rank's; it must outlive all groups. api: may be null when there is one
// rank, which needs no NCCL. Collective over host; blocks, at most for its timeout.
std::shared_ptr<comm::Communicator> make_nccl_communicator(std::shared_ptr<comm::Communicator> host, CudaDevice& device,
                                                           const NcclApi* api, NcclOptions options = {});

// Collectives that copy to pinned host memory, run there, and copy back. Waits for them happen on the host.
std::shared_ptr<comm::Communicator> make_staged_communicator(std::shared_ptr<comm::Communicator> host,
                                                             CudaDevice& device);

// Whether any two ranks were given the same GPU. Collective; blocks.
bool ranks_share_a_device(comm::Communicator& host, CudaDevice& device);

// The one that fits: over NCCL, which load_nccl(nccl_path) finds, unless ranks share a GPU.
std::shared_ptr<comm::Communicator> make_device_communicator(std::shared_ptr<comm::Communicator> host,
                                                             CudaDevice& device, const std::string& nccl_path,
                                                             NcclOptions options = {});

}  // namespace zc::cuda
