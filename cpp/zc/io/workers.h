// A few threads that share a list of equal tasks.
#pragma once

#include <cstdint>
#include <functional>

namespace zc::io {

// Runs task(worker, index) once for every index of [0, count), on up to `num_workers` threads of which the caller's is
// one; each takes the next index. Returns when all are done. After a task has thrown no more are begun, and the first
// exception is rethrown. Where the system gives no more threads the work is done by those that there are.
void run_workers(std::int64_t count, int num_workers, const std::function<void(int worker, std::int64_t index)>& task);

// One a core that this process may use, at most 8: what copies at memory speed.
int num_copy_workers();

}  // namespace zc::io
