// Ranks that end before the job has started, while others wait for them in MPI_Init, which nothing can interrupt.
//
// There is no connection between ranks yet. On one machine the list of processes tells: a rank of which no process is
// left will not come.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace zc::comm {

// The ranks of this process's job of which no process is left, all ranks being on this machine; none where processes
// cannot be seen. rank_variable: of the environment, in which the launcher tells each process its rank. own: this
// process's id. proc: where processes are listed.
std::vector<int> missing_ranks(const std::string& rank_variable, int size, int own, const std::string& proc = "/proc");

// For a Watchdog: names ranks that were missing in two calls that follow each other.
std::function<std::string()> look_for_missing_ranks(std::string rank_variable, int size);

}  // namespace zc::comm
