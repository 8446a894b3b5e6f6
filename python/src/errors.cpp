#include <cstring>

#include "bindings.h"
#include "zc/base/error.h"

namespace py = pybind11;

namespace {

const char* class_name(zc::ErrorKind kind) {
  switch (kind) {
    case zc::ErrorKind::kConfig:
      return "ConfigError";
    case zc::ErrorKind::kComm:
      return "CommError";
    case zc::ErrorKind::kIo:
      return "IoError";
    case zc::ErrorKind::kCheckpoint:
      return "CheckpointError";
    case zc::ErrorKind::kDevice:
      return "DeviceError";
    case zc::ErrorKind::kUnsupported:
      return "UnsupportedError";
    case zc::ErrorKind::kNonFinite:
      return "NonFiniteError";
    case zc::ErrorKind::kInternal:
      return "InternalError";
  }
  return "Error";
}

// Labels are cut by bytes, so a message may end a character early.
py::object text(const char* message) {
  return py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(message, static_cast<Py_ssize_t>(std::strlen(message)), "replace"));
}

void translate(const zc::Error& error) {
  const py::object type = py::module_::import("zerocore.errors").attr(class_name(error.kind()));
  if (error.kind() == zc::ErrorKind::kIo) {
    py::object path = py::none();
    if (!error.path().empty()) {
      path = py::reinterpret_steal<py::object>(PyUnicode_DecodeFSDefault(error.path().c_str()));
    }
    PyErr_SetObject(type.ptr(), type(error.errno_value(), text(error.what()), path).ptr());
  } else {
    PyErr_SetObject(type.ptr(), type(text(error.what())).ptr());
  }
}

}  // namespace

// zc::Error arrives in Python as the class of zerocore.errors for its kind; IoError carries errno and filename.
void bind_errors(py::module_&) {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const zc::Error& error) {
      translate(error);
    }
  });
}
