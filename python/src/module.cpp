// zerocore._core: the bindings of the C++ core, one file a topic.
#include "bindings.h"

PYBIND11_MODULE(_core, m) {
  m.doc() = "C++ core of zerocore. Internal: use the zerocore package.";
  bind_errors(m);
  bind_base(m);
  bind_ckpt(m);
  bind_comm(m);
  bind_engine(m);
}
