// The zc::Error that a call throws.
#pragma once

#include <gtest/gtest.h>

#include "zc/base/error.h"

namespace zc::test {

// Fails the test, and returns a kInternal error without text, when nothing is thrown.
template <class Call>
Error error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return {ErrorKind::kInternal, ""};
}

inline void expect_contains(const Error& error, std::string_view part) {
  EXPECT_NE(std::string_view(error.what()).find(part), std::string_view::npos) << error.what();
}

}  // namespace zc::test
