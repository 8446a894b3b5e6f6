#include <pybind11/stl.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "bindings.h"
#include "memory.h"
#include "zc/comm/communicator.h"
#include "zc/comm/missing_ranks.h"
#include "zc/comm/mpi_transport.h"
#include "zc/comm/self_communicator.h"
#include "zc/comm/shm_transport.h"
#include "zc/comm/transport_communicator.h"
#include "zc/comm/watchdog.h"

namespace py = pybind11;
using NoGil = py::call_guard<py::gil_scoped_release>;
using std::chrono::milliseconds;
using zc::comm::Communicator;
using zc::comm::Work;

namespace {

// Waits without the GIL, and looks at signals in between, so that Ctrl-C works while peers are awaited.
void wait(const Work& work) {
  for (;;) {
    {
      py::gil_scoped_release unlocked;
      if (work.wait_for(milliseconds(100))) return;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

// A call may do the work at once, and ask another thread for its place when that fails.
template <class Call>
Work without_gil(Call call) {
  py::gil_scoped_release unlocked;
  return call();
}

// The blocking forms. Their memory lives on with the Work when a signal ends the wait.
std::vector<py::bytes> gather_bytes(Communicator& comm, std::string_view data, std::string_view label) {
  struct Memory {
    std::vector<std::byte> in, out;
  };
  auto memory = std::make_shared<Memory>();
  memory->in.resize(data.size());
  memory->out.resize(data.size() * static_cast<std::size_t>(comm.size()));
  if (!data.empty()) std::memcpy(memory->in.data(), data.data(), data.size());
  const Work work = without_gil([&] { return comm.gather_bytes(memory->in, memory->out, label); });
  work.keep(memory);
  wait(work);
  std::vector<py::bytes> all;
  for (int rank = 0; rank < comm.size(); ++rank) {
    const auto offset = static_cast<std::size_t>(rank) * data.size();
    all.emplace_back(reinterpret_cast<const char*>(memory->out.data() + offset), data.size());
  }
  return all;
}

std::vector<std::int64_t> all_reduce(Communicator& comm, std::vector<std::int64_t> values, zc::comm::ReduceOp op,
                                     std::string_view label) {
  auto memory = std::make_shared<std::vector<std::int64_t>>(std::move(values));
  const Work work = without_gil([&] { return comm.all_reduce(*memory, op, label); });
  work.keep(memory);
  wait(work);
  return *memory;
}

// Python calls functions registered here after its own finalisation, the last one first: so before mpi4py's, which
// would call MPI_Finalize and wait there for ranks that are gone.
void end_process_without_finalize() {
  static const bool registered = [] {
    return Py_AtExit([] {
             std::fflush(nullptr);
             _exit(1);
           }) == 0;
  }();
  if (!registered) _exit(1);  // Python's table of 32 such functions is full
}

py::dict counters(const Communicator& comm) {
  py::dict report;
  for (int op = 0; op < zc::comm::kNumOps; ++op) {
    const zc::comm::Counter& counter = comm.counters()[static_cast<std::size_t>(op)];
    py::dict entry;
    entry["calls"] = counter.calls;
    entry["elements"] = counter.elements;
    report[zc::comm::name(static_cast<zc::comm::Op>(op))] = entry;
  }
  return report;
}

py::dict traffic(const Communicator& comm) {
  py::dict report;
  for (int i = 0; i < zc::comm::kNumOps; ++i) {
    const auto op = static_cast<zc::comm::Op>(i);
    const zc::comm::Counter& counter = comm.counters()[static_cast<std::size_t>(i)];
    report[zc::comm::name(op)] = py::make_tuple(counter.calls, counter.bytes, comm.nanoseconds(op));
  }
  return report;
}

// A stream as frameworks hand it over: its handle as a number, 0 the default stream.
zc::device::Stream stream(std::uintptr_t handle) { return {reinterpret_cast<void*>(handle)}; }

}  // namespace

void bind_comm(py::module_& m) {
  py::enum_<zc::comm::ReduceOp>(m, "ReduceOp")
      .value("sum", zc::comm::ReduceOp::kSum)
      .value("max", zc::comm::ReduceOp::kMax)
      .value("bit_or", zc::comm::ReduceOp::kBitOr);

  py::class_<Work>(m, "Work", "A collective in flight. The memory it was given must stay alive until wait() is over.")
      .def("wait", &wait, "Blocks until the collective is done; raises what made it fail.")
      .def(
          "order", [](const Work& self, std::uintptr_t handle) { self.wait(stream(handle)); }, NoGil(),
          py::arg("stream"), "What is put on the stream from now on sees the result. Host memory: as wait().")
      .def("done", &Work::done, NoGil());

  py::class_<Communicator, std::shared_ptr<Communicator>>(m, "Communicator", "Collectives over a group of ranks.")
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("backend", &Communicator::backend,
                             "'self', 'mpi', 'shm'; on GPUs 'nccl' or 'staged'; 'plan' where nothing is sent.")
      .def_property(
          "timeout_ms", [](const Communicator& self) { return self.timeout().count(); },
          [](Communicator& self, std::int64_t value) { self.set_timeout(milliseconds(value)); },
          "How long a collective waits for a peer that does not arrive.")
      .def(
          "allocate", [](Communicator& self, std::int64_t bytes) { return PyMemory{self.allocate(bytes), bytes}; },
          py::arg("bytes"), "Zeroed memory that peers may read.")
      .def(
          "reduce_scatter_add",
          [](Communicator& self, zc::BufferView bucket, zc::BufferView shard, std::string_view label, bool first,
             std::uintptr_t after) { return self.reduce_scatter_add(bucket, shard, label, first, stream(after)); },
          NoGil(), py::arg("bucket"), py::arg("shard"), py::arg("label"), py::arg("first") = false,
          py::arg("after") = 0,
          "shard += this rank's slice of every rank's bucket, in rank order, rounded to the shard's dtype after each "
          "addition. Both: fp32, fp16 or bf16. first: the shard counts as +0, whatever it holds. Returns a Work.")
      .def(
          "all_gather",
          [](Communicator& self, zc::BufferView full, std::string_view label, std::uintptr_t after) {
            return self.all_gather(full, label, stream(after));
          },
          NoGil(), py::arg("full"), py::arg("label"), py::arg("after") = 0,
          "Fills the other ranks' slices of `full` in place. Returns a Work.")
      .def(
          "all_gather",
          [](Communicator& self, zc::BufferView shard, zc::BufferView full, std::string_view label,
             std::uintptr_t after) { return self.all_gather(shard, full, label, stream(after)); },
          NoGil(), py::arg("shard"), py::arg("full"), py::arg("label"), py::arg("after") = 0,
          "Fills `full` from every rank's `shard`, which lies outside it. Returns a Work.")
      .def(
          "broadcast",
          [](Communicator& self, zc::BufferView view, int root, std::string_view label, std::uintptr_t after) {
            return self.broadcast(view, root, label, stream(after));
          },
          NoGil(), py::arg("view"), py::arg("root"), py::arg("label"), py::arg("after") = 0,
          "Copies the root's memory to every rank. Returns a Work.")
      .def("barrier", &Communicator::barrier, NoGil(), py::arg("label"), "Returns a Work.")
      .def("all_reduce", &all_reduce, py::arg("values"), py::arg("op"), py::arg("label"),
           "Reduces a few integers exactly, element by element. Blocks; returns the result.")
      .def("gather_bytes", &gather_bytes, py::arg("data"), py::arg("label"),
           "Every rank's bytes, in rank order; equally long on all ranks. Blocks.")
      .def("split", &Communicator::split, NoGil(), py::arg("color"), py::arg("key"),
           "The group of ranks with this color, ordered by (key, rank). Collective; blocks.")
      .def("set_activity", &Communicator::set_activity, py::arg("activity"),
           "What this rank is doing, for the errors of all ranks.")
      .def(
          "leave",
          [](Communicator& self, bool failed, std::string_view reason, std::int64_t grace_ms) {
            const auto departure = failed ? zc::comm::Departure::kFailed : zc::comm::Departure::kEnded;
            self.leave(departure, reason, milliseconds(grace_ms));
          },
          NoGil(), py::kw_only(), py::arg("failed"), py::arg("reason"), py::arg("grace_ms"),
          "Tells all ranks that this one ends, then waits until all have said so or the grace is over.")
      .def("watch_processes", &Communicator::watch_processes, NoGil(),
           "Lets the end of any rank's process be known to all. Returns why not; '' when it is. Collective; blocks.")
      .def("promise_place", &Communicator::promise_place, "A thread will answer place_wanted() with tell_place().")
      .def("place_wanted", &Communicator::place_wanted, NoGil(),
           "Blocks until the place in the user's code is wanted for an error. False: it will not be any more.")
      .def("tell_place", &Communicator::tell_place, py::arg("place"))
      .def("failure", &Communicator::failure, "Why collectives can no longer succeed, or a peer's failure; '' if well.")
      .def("staging_bytes", &Communicator::staging_bytes)
      .def("counters", &counters, "{operation: {'calls': int, 'elements': int}}")
      .def("time_calls", &Communicator::time_calls, "From now on collectives are timed, and those of later splits.")
      .def("traffic", &traffic, "{operation: (calls, bytes, nanoseconds)}");

  m.def(
      "self_communicator",
      [](std::int64_t timeout_ms) { return zc::comm::make_self_communicator({milliseconds(timeout_ms)}); },
      py::kw_only(), py::arg("timeout_ms"), "The communicator of a job of one rank.");
  m.def(
      "mpi_communicator",
      [](const std::string& plugin, int fortran_handle, std::int64_t timeout_ms) {
        return zc::comm::make_mpi_communicator(plugin, fortran_handle, {milliseconds(timeout_ms)});
      },
      NoGil(), py::kw_only(), py::arg("plugin"), py::arg("fortran_handle"), py::arg("timeout_ms"),
      "The communicator over an MPI communicator that is used for nothing else.");
  m.def(
      "shm_communicator",
      [](Communicator& over, std::int64_t timeout_ms) -> std::pair<std::shared_ptr<Communicator>, std::string> {
        std::string reason;
        const auto exchange = [&over](std::span<const std::byte> own, std::span<std::byte> all) {
          over.gather_bytes(own, all, "ranks that share memory find each other").wait();
        };
        auto transport = zc::comm::connect_shm(over.rank(), over.size(), exchange, &reason);
        if (transport == nullptr) return {nullptr, reason};
        return {zc::comm::make_transport_communicator(std::move(transport), {milliseconds(timeout_ms)}), ""};
      },
      NoGil(), py::arg("over"), py::kw_only(), py::arg("timeout_ms"),
      "A communicator of the same ranks through shared memory, and ''; or None and why not. Collective; blocks.");
  py::class_<zc::comm::Watchdog>(m, "Watchdog", "Ends the process, saying why, unless released in time.")
      .def(py::init([](std::int64_t timeout_ms, std::string prefix, std::string message, std::string rank_variable,
                       int size) {
             std::function<std::string()> look;
             if (!rank_variable.empty()) look = zc::comm::look_for_missing_ranks(std::move(rank_variable), size);
             return std::make_unique<zc::comm::Watchdog>(milliseconds(timeout_ms), std::move(prefix),
                                                         std::move(message), std::move(look));
           }),
           py::kw_only(), py::arg("timeout_ms"), py::arg("prefix"), py::arg("message"), py::arg("rank_variable"),
           py::arg("size"), "rank_variable: of the environment, to look for ranks that have ended; '' does not look.")
      .def("release", &zc::comm::Watchdog::release);
  m.def("end_process_without_finalize", &end_process_without_finalize,
        "When Python has ended, ends the process with exit code 1 and without MPI_Finalize.");
}
