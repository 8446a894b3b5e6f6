// A device's kernels over plain buffers, for tests and benchmarks: the engine's calls go through StepEngine. What a
// kernel reads beside its buffers (pieces, scalars, flags) is put into the device's memory before.
#include "zc/device/kernels.h"

#include <pybind11/stl.h>

#include <numeric>
#include <optional>

#include "bindings.h"
#include "zc/device/device.h"
#include "zc/device/piece_table.h"
#include "zc/device/transfer.h"
#include "zc/optim/optimizer.h"

namespace py = pybind11;
using NoGil = py::call_guard<py::gil_scoped_release>;
using zc::BufferView;
using zc::DType;
using zc::device::Device;
using zc::device::Piece;
using zc::device::Stream;

namespace {

using OptionalView = std::optional<BufferView>;
using Part = std::tuple<OptionalView, std::int64_t, std::int64_t>;        // what goes there or zeros, offset, numel
using PieceTuple = std::tuple<std::int64_t, std::int64_t, std::int32_t>;  // offset, numel, slot

Stream stream_at(std::uintptr_t handle) { return {reinterpret_cast<void*>(handle)}; }

// Kernels are told addresses only: what they are said to find there is checked here.
void check_buffer(const Device& device, const BufferView& view, bool fits, const char* what) {
  ZC_CHECK(fits && view.device == device.id(), kInternal, "[kernels] ", what, ": got ", view.numel, " elements of ",
           name(view.dtype), " in ", to_text(view.device), ", which do not fit the others or are not in ",
           to_text(device.id()));
}

void check_floating(const Device& device, const BufferView& view, const char* what) {
  check_buffer(device, view, is_floating(view.dtype), what);
}

std::vector<Piece> pieces_of(const std::vector<PieceTuple>& tuples, std::size_t num_slots) {
  std::vector<Piece> pieces;
  for (const auto& [offset, numel, slot] : tuples) {
    ZC_CHECK(offset >= 0 && numel >= 0 && slot >= 0 && static_cast<std::size_t>(slot) < num_slots, kInternal,
             "[kernels] got a piece at ", offset, " of ", numel, " elements in slot ", slot, " of ", num_slots);
    pieces.push_back({offset, numel, slot});
  }
  return pieces;
}

std::int64_t end_of(const std::vector<Piece>& pieces) {
  return std::accumulate(pieces.begin(), pieces.end(), std::int64_t{0}, [](std::int64_t end, const Piece& piece) {
    return std::max(end, piece.offset + piece.numel);
  });
}

// The kernels that need their buffers only.
class PyKernels {
 public:
  explicit PyKernels(Device& device) : device_(device), kernels_(device.kernels()) {}

  void zero(BufferView out, std::uintptr_t stream) {
    check_buffer(device_, out, true, "zero");
    kernels_.zero(out, stream_at(stream));
  }

  void cast(BufferView in, BufferView out, std::uintptr_t stream) {
    check_floating(device_, in, "cast");
    check_buffer(device_, out, is_floating(out.dtype) && out.numel == in.numel, "cast");
    kernels_.cast(in, out, stream_at(stream));
  }

  void pack(const std::vector<Part>& parts, BufferView out, std::uintptr_t stream) {
    kernels_.pack(parts_of(parts, out, "pack"), out, stream_at(stream));
  }

  void fold_parts(const std::vector<Part>& parts, DType dtype, BufferView acc, bool first, std::uintptr_t stream) {
    kernels_.fold_parts(parts_of(parts, acc, "fold_parts"), dtype, acc, first, stream_at(stream));
  }

  void fold(const std::vector<BufferView>& in, BufferView acc, bool first, std::uintptr_t stream) {
    check_buffer(device_, acc, is_floating(acc.dtype) && !in.empty(), "fold");
    std::vector<const void*> sources;
    for (const BufferView& view : in) {
      const bool fits = view.numel == acc.numel && view.dtype == in[0].dtype && is_floating(view.dtype);
      check_buffer(device_, view, fits, "fold");
      sources.push_back(view.data);
    }
    zc::device::fold(kernels_, sources, in[0].dtype, acc, first, stream_at(stream));
  }

  void scale(BufferView inout, float factor, std::uintptr_t stream) {
    check_buffer(device_, inout, inout.dtype == DType::kF32, "scale");
    kernels_.scale(inout, factor, stream_at(stream));
  }

  void orthogonalize(BufferView matrix, std::int64_t rows, std::int64_t columns, int iterations, BufferView workspace,
                     std::uintptr_t stream) {
    check_buffer(device_, matrix, matrix.dtype == DType::kF32 && matrix.numel == rows * columns, "orthogonalize");
    const bool has_room = workspace.numel >= zc::device::orthogonalize_workspace(rows, columns);
    check_buffer(device_, workspace, workspace.dtype == DType::kF32 && has_room, "orthogonalize");
    kernels_.orthogonalize(matrix.as<float>(), rows, columns, iterations, workspace.as<float>(), stream_at(stream));
  }

 private:
  std::vector<zc::device::Part> parts_of(const std::vector<Part>& parts, const BufferView& whole, const char* what) {
    check_floating(device_, whole, what);
    std::vector<zc::device::Part> out;
    for (const auto& [view, offset, numel] : parts) {
      static_cast<void>(whole.slice(offset, numel));
      if (view) check_buffer(device_, *view, is_floating(view->dtype) && view->numel == numel, what);
      out.push_back({view ? view->data : nullptr, view ? view->dtype : DType::kF32, offset, numel});
    }
    return out;
  }

  Device& device_;
  zc::device::Kernels& kernels_;
};

// The norm of one flat buffer, and the step's scalars that follow from it.
class PyNorm {
 public:
  PyNorm(Device& device, const std::vector<PieceTuple>& pieces, std::int64_t num_slots)
      : device_(device),
        num_slots_(num_slots),
        pieces_(device, pieces_of(pieces, static_cast<std::size_t>(num_slots))),
        sums_(device, static_cast<std::int64_t>(sizeof(zc::math::ExactSum)) + num_slots * size_bytes(DType::kI64)),
        outcome_(device, sizeof(zc::math::StepOutcome)),
        state_(device, sizeof(zc::math::StepOutcome)) {}

  // Of a new sum.
  void square_sum(BufferView in, std::uintptr_t stream) {
    check_buffer(device_, in, is_floating(in.dtype) && end_of(pieces_.list()) <= in.numel, "square_sum");
    constexpr std::int64_t kWords = sizeof(zc::math::ExactSum) / sizeof(std::int64_t);
    device_.kernels().zero({sums_.there(), kWords + num_slots_, DType::kI64, device_.id()}, stream_at(stream));
    device_.kernels().square_sum(in, pieces_, sum(), nonfinite(), stream_at(stream));
  }

  // (limbs, normalized; which slots are not finite). Waits.
  std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>> sums(std::uintptr_t stream) {
    sums_.fetch(stream_at(stream));
    sums_.wait();
    zc::math::ExactSum sum = *reinterpret_cast<const zc::math::ExactSum*>(sums_.host());
    sum.normalize();
    const auto* counts = reinterpret_cast<const std::int64_t*>(sums_.host() + sizeof(zc::math::ExactSum));
    return {{sum.limbs().begin(), sum.limbs().end()}, {counts, counts + num_slots_}};
  }

  // (grad_norm, clip, factor, skip, scale, iteration, last_overflow, hysteresis, exhausted) after a step. state: of
  // the loss scale before it, where there is a rule. Waits.
  py::tuple finish(double divisor, double max_norm, const std::optional<zc::math::LossScaleRule>& rule,
                   std::tuple<double, std::int64_t, std::int64_t, std::int64_t> state, std::uintptr_t stream) {
    zc::math::StepOutcome outcome;
    {
      const py::gil_scoped_release unlocked;
      auto* before = reinterpret_cast<zc::math::StepOutcome*>(state_.host());
      *before = {};
      before->scale = {std::get<0>(state), std::get<1>(state), std::get<2>(state), std::get<3>(state)};
      const BufferView from{const_cast<std::byte*>(state_.send(stream_at(stream))), sizeof outcome, DType::kU8,
                            device_.id()};
      device_.copy(from, {outcome_.there(), sizeof outcome, DType::kU8, device_.id()}, stream_at(stream));
      device_.kernels().finish_norm(sum(), nonfinite(), num_slots_,
                                    {divisor, max_norm, rule.has_value(), rule.value_or(zc::math::LossScaleRule{})},
                                    reinterpret_cast<zc::math::StepOutcome*>(outcome_.there()), stream_at(stream));
      outcome_.fetch(stream_at(stream));
      outcome_.wait();
      outcome = *reinterpret_cast<const zc::math::StepOutcome*>(outcome_.host());
    }
    const auto& [scalars, scale, scale_f32, exhausted] = outcome;
    return py::make_tuple(scalars.grad_norm, scalars.clip, scalars.factor, scalars.skip, scale.scale, scale.iteration,
                          scale.last_overflow, scale.hysteresis, exhausted);
  }

 private:
  zc::math::ExactSum* sum() { return reinterpret_cast<zc::math::ExactSum*>(sums_.there()); }
  std::int64_t* nonfinite() { return reinterpret_cast<std::int64_t*>(sums_.there() + sizeof(zc::math::ExactSum)); }

  Device& device_;
  std::int64_t num_slots_;
  zc::device::PieceTable pieces_;
  zc::device::Download sums_;  // an ExactSum, then a count a slot
  zc::device::Download outcome_;
  zc::device::Upload state_;
};

// An optimizer over flat buffers, with a group of hyperparameters a slot.
class PyUpdate {
 public:
  PyUpdate(Device& device, const std::vector<PieceTuple>& pieces, std::vector<zc::optim::Hyper> hypers,
           const std::vector<double>& rows_by_columns)
      : device_(device),
        pieces_(device, pieces_of(pieces, hypers.size())),
        step_(device, sizeof(zc::math::StepScalars)),
        optimizer_(device, hypers, slots_of(rows_by_columns, hypers.size())) {}

  // The scalars of the next step, which the kernels take until another is begun.
  void begin_step(const std::vector<bool>& used, float factor, bool skip, std::uintptr_t stream) {
    auto* scalars = reinterpret_cast<zc::math::StepScalars*>(step_.host());
    *scalars = {};
    scalars->factor = factor;
    scalars->skip = skip ? 1 : 0;
    there_ = reinterpret_cast<const zc::math::StepScalars*>(step_.send(stream_at(stream)));
    optimizer_.begin_step(std::vector<std::uint8_t>(used.begin(), used.end()), stream_at(stream));
  }

  void run(const OptionalView& grad, BufferView param, const OptionalView& state1, const OptionalView& state2,
           const OptionalView& direction, const OptionalView& model, std::uintptr_t stream) {
    optimizer_.update(pieces_, there_, buffers(grad, param, state1, state2, direction, model), stream_at(stream));
  }

  void muon_momentum(BufferView grad, BufferView state1, BufferView direction, std::uintptr_t stream) {
    optimizer_.muon_momentum(pieces_, there_, buffers(grad, {}, state1, {}, direction, {}), stream_at(stream));
  }

 private:
  static std::vector<zc::optim::Optimizer::Slot> slots_of(const std::vector<double>& rows_by_columns,
                                                          std::size_t num_slots) {
    ZC_CHECK(rows_by_columns.empty() || rows_by_columns.size() == num_slots, kInternal, "[kernels] ",
             rows_by_columns.size(), " shapes of ", num_slots, " slots");
    std::vector<zc::optim::Optimizer::Slot> slots(num_slots);
    for (std::size_t i = 0; i < num_slots; ++i) {
      slots[i] = {static_cast<int>(i), rows_by_columns.empty() ? 0 : rows_by_columns[i]};
    }
    return slots;
  }

  zc::device::OptimizerBuffers buffers(const OptionalView& grad, const OptionalView& param, const OptionalView& state1,
                                       const OptionalView& state2, const OptionalView& direction,
                                       const OptionalView& model) {
    ZC_CHECK(there_ != nullptr, kInternal, "[kernels] got an update, expected a begin_step() before");
    const std::int64_t numel = end_of(pieces_.list());
    for (const OptionalView* view : {&grad, &model}) {
      if (*view) check_buffer(device_, **view, is_floating((*view)->dtype) && (*view)->numel >= numel, "update");
    }
    const auto fp32 = [&](const OptionalView& view) {
      if (view) check_buffer(device_, *view, view->dtype == DType::kF32 && view->numel >= numel, "update");
      return view ? view->as<float>() : nullptr;
    };
    return {.grad = grad ? grad->data : nullptr,
            .grad_dtype = grad ? grad->dtype : DType::kF32,
            .param = fp32(param),
            .state1 = fp32(state1),
            .state2 = fp32(state2),
            .direction = fp32(direction),
            .model = model ? model->data : nullptr,
            .model_dtype = model ? model->dtype : DType::kF32};
  }

  Device& device_;
  zc::device::PieceTable pieces_;
  zc::device::Upload step_;
  const zc::math::StepScalars* there_ = nullptr;
  zc::optim::Optimizer optimizer_;
};

}  // namespace

void bind_kernels(py::module_& m) {
  const auto stream = py::arg("stream") = 0;
  m.def("orthogonalize_workspace", &zc::device::orthogonalize_workspace, py::arg("rows"), py::arg("columns"));

  py::class_<PyKernels>(m, "Kernels", "A device's kernels. A stream: the handle, in whose order they run.")
      .def(py::init<Device&>())
      .def("zero", &PyKernels::zero, NoGil(), py::arg("out"), stream)
      .def("cast", &PyKernels::cast, NoGil(), py::arg("source"), py::arg("out"), stream)
      .def("pack", &PyKernels::pack, NoGil(), py::arg("parts"), py::arg("out"), stream)
      .def("fold_parts", &PyKernels::fold_parts, NoGil(), py::arg("parts"), py::arg("dtype"), py::arg("acc"),
           py::kw_only(), py::arg("first"), stream)
      .def("fold", &PyKernels::fold, NoGil(), py::arg("sources"), py::arg("acc"), py::kw_only(), py::arg("first"),
           stream)
      .def("scale", &PyKernels::scale, NoGil(), py::arg("inout"), py::arg("factor"), stream)
      .def("orthogonalize", &PyKernels::orthogonalize, NoGil(), py::arg("matrix"), py::arg("rows"), py::arg("columns"),
           py::arg("iterations"), py::arg("workspace"), stream);

  py::class_<PyNorm>(m, "Norm", "square_sum and finish_norm over pieces (offset, numel, slot) of a buffer.")
      .def(py::init<Device&, std::vector<PieceTuple>, std::int64_t>(), py::arg("device"), py::arg("pieces"),
           py::arg("num_slots"))
      .def("square_sum", &PyNorm::square_sum, NoGil(), py::arg("source"), stream)
      .def("sums", &PyNorm::sums, NoGil(), stream)
      .def("finish", &PyNorm::finish, py::kw_only(), py::arg("divisor"), py::arg("max_norm"), py::arg("rule"),
           py::arg("state"), stream);

  py::class_<PyUpdate>(m, "Update", "An optimizer over pieces (offset, numel, slot) of flat buffers.")
      .def(py::init<Device&, std::vector<PieceTuple>, std::vector<zc::optim::Hyper>, std::vector<double>>(),
           py::arg("device"), py::arg("pieces"), py::arg("hypers"), py::arg("rows_by_columns") = std::vector<double>{})
      .def("begin_step", &PyUpdate::begin_step, NoGil(), py::kw_only(), py::arg("used"), py::arg("factor"),
           py::arg("skip"), stream)
      .def("run", &PyUpdate::run, NoGil(), py::kw_only(), py::arg("grad") = py::none(), py::arg("param"),
           py::arg("state1") = py::none(), py::arg("state2") = py::none(), py::arg("direction") = py::none(),
           py::arg("model") = py::none(), stream)
      .def("muon_momentum", &PyUpdate::muon_momentum, NoGil(), py::kw_only(), py::arg("grad"), py::arg("state1"),
           py::arg("direction"), stream);
}
