#pragma once

#include "zc/base/memory.h"

// Core memory as a writable Python buffer of bytes; whoever wraps the buffer keeps the memory alive.
struct PyMemory {
  zc::Memory memory;
  std::int64_t bytes = 0;
};
