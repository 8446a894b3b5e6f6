// Loops over memory on several threads.
//
// Note: the threads are the core's own. OpenMP's belong to the framework: it sizes them, and they spin for a while
// after each of its operations. These sleep between loops, so they take no core from anybody; one who still spins costs
// a loop a part of its speed for that moment, never more, since pieces of a loop go to whoever is free.
#pragma once

#include <cstdint>
#include <functional>

namespace zc {

// How many threads, the caller's included, parallel_for() uses from now on: at most one a core that this process may
// run on. 1 until it is called: ranks share the cores of a machine, and only the program knows how.
void set_num_threads(int num_threads);
int num_threads();

// Calls body(begin, end) for ranges that make up [0, numel), each but the last `grain` long, on up to num_threads()
// threads; returns when all are done. So a body may not rely on which thread runs it, and must not throw. Threads run
// in the default floating-point environment. Runs on the caller's thread alone when there is one range only, when
// another loop is on its way in this process, and in a forked child, which has none of its parent's threads.
void parallel_for(std::int64_t numel, std::int64_t grain, const std::function<void(std::int64_t, std::int64_t)>& body);

}  // namespace zc
