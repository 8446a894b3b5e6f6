// How long tests of communicators wait.
#pragma once

#include <chrono>

namespace zc::comm {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

constexpr seconds kLong{30};  // for what comes

}  // namespace zc::comm
