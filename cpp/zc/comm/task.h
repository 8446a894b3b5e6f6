// Coroutines that wait for messages: what a collective is to the endpoint that drives it.
#pragma once

#include <coroutine>
#include <exception>
#include <utility>

namespace zc::comm {

// A coroutine that runs when it is called, until it first suspends (`co_await std::suspend_always{}`) or ends. A task
// that co_awaits another suspends with it and gets its exception. Arguments taken by reference must outlive the task.
// One thread at a time runs a task; which one may change from turn to turn.
class Task {
 public:
  struct promise_type;
  using Handle = std::coroutine_handle<promise_type>;

  struct promise_type {
    Handle inner;  // the task that this one awaits
    std::exception_ptr error;

    Task get_return_object() { return Task(Handle::from_promise(*this)); }
    std::suspend_never initial_suspend() noexcept { return {}; }
    std::suspend_always final_suspend() noexcept { return {}; }
    void return_void() noexcept {}
    void unhandled_exception() noexcept { error = std::current_exception(); }
  };

  Task() = default;  // nothing to do
  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Task& operator=(Task&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Task() {
    if (handle_) handle_.destroy();
  }

  bool done() const { return !handle_ || handle_.done(); }

  // Goes on where the task, or the innermost one that it awaits, is suspended. Not when done.
  void resume() { resume(handle_); }

  // --- What co_await calls.
  bool await_ready() const { return done(); }
  void await_suspend(Handle outer) { outer.promise().inner = handle_; }
  void await_resume() const {
    if (handle_ && handle_.promise().error) std::rethrow_exception(handle_.promise().error);
  }

 private:
  explicit Task(Handle handle) : handle_(handle) {}

  static void resume(Handle handle) {
    if (const Handle inner = handle.promise().inner) {
      resume(inner);
      if (!inner.done()) return;
      handle.promise().inner = nullptr;
    }
    handle.resume();
  }

  Handle handle_;
};

}  // namespace zc::comm
