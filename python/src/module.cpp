// zerocore._core: the bindings of the C++ core, one file a topic.
#include "bindings.h"

#ifdef __clang__
#define ZC_COMPILER ""  // __VERSION__ names it
#else
#define ZC_COMPILER "GCC "
#endif

PYBIND11_MODULE(_core, m) {
  m.doc() = "C++ core of zerocore. Internal: use the zerocore package.";
  m.attr("compiler") = ZC_COMPILER __VERSION__;
  bind_errors(m);
  bind_base(m);
  bind_ckpt(m);
  bind_comm(m);
  bind_device(m);
  bind_engine(m);
  bind_kernels(m);
}
