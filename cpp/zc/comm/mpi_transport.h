// Messages over MPI, through a plugin that is loaded at run time. MPI itself has been loaded and initialised by the
// host program (mpi4py); nothing here starts or ends it.
#pragma once

#include <memory>
#include <string>

#include "zc/comm/communicator.h"
#include "zc/comm/transport.h"

namespace zc::comm {

// plugin_path: the plugin built for the MPI library that runs. fortran_handle: of a communicator that is used for
// nothing else (a duplicate of MPI_COMM_WORLD), which must stay valid. Throws kConfig when the plugin cannot be loaded,
// belongs to another MPI library than the one that is up, or when that grants less than MPI_THREAD_SERIALIZED.
std::unique_ptr<Transport> make_mpi_transport(const std::string& plugin_path, int fortran_handle);

std::shared_ptr<Communicator> make_mpi_communicator(const std::string& plugin_path, int fortran_handle,
                                                    Options options = {});

}  // namespace zc::comm
