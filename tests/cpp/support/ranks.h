// Runs a function as every rank of a world of threads, one thread a rank.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "support/meeting.h"
#include "zc/comm/communicator.h"
#include "zc/comm/local_transport.h"
#include "zc/comm/shm_transport.h"
#include "zc/comm/transport_communicator.h"

namespace zc::test {

// Of ranks that meet at `meeting`.
inline std::unique_ptr<comm::Transport> connect_shm(Meeting& meeting, int rank, int size) {
  std::string reason;
  auto transport =
      comm::connect_shm(rank, size, [&](auto own, auto all) { meeting.exchange(rank, own, all); }, &reason);
  if (transport == nullptr) throw std::runtime_error(reason);
  return transport;
}

// Ranks that share this process and nothing else.
inline std::vector<std::unique_ptr<comm::Transport>> make_shm_transports(int size) {
  Meeting meeting(size);
  std::vector<std::unique_ptr<comm::Transport>> ends(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] { ends[static_cast<std::size_t>(rank)] = connect_shm(meeting, rank, size); });
  }
  for (std::thread& thread : threads) thread.join();
  return ends;
}

inline std::vector<std::unique_ptr<comm::Transport>> make_transports(std::string_view backend, int size) {
  return backend == "shm" ? make_shm_transports(size) : comm::make_local_transports(size);
}

inline std::vector<std::shared_ptr<comm::Communicator>> make_world(std::string_view backend, int size,
                                                                   comm::Options options) {
  std::vector<std::shared_ptr<comm::Communicator>> world;
  for (auto& end : make_transports(backend, size)) {
    world.push_back(comm::make_transport_communicator(std::move(end), options));
  }
  return world;
}

// Rethrows the first failure after all ranks have ended.
inline void run_ranks(int size, const std::function<void(std::shared_ptr<comm::Communicator>)>& body,
                      comm::Options options = {std::chrono::seconds(20)}, std::string_view backend = "local") {
  auto world = make_world(backend, size, options);
  std::vector<std::exception_ptr> failures(world.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < world.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(world[rank]);
      } catch (...) {
        failures[rank] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

}  // namespace zc::test
