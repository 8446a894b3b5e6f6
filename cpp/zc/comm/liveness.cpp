#include "zc/comm/liveness.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <random>
#include <utility>

#include "zc/base/error.h"
#include "zc/comm/call_header.h"

namespace zc::comm {
namespace {

constexpr std::chrono::seconds kGreetingLimit{1};
constexpr int kConnectSeconds = 5;  // on the loopback interface it takes microseconds
constexpr int kMaxStrangers = 16;   // connections that have not said hello, of whoever looks at open ports

std::string first_line(const char* path) {
  std::string line;
  std::ifstream file(path);
  std::getline(file, line);
  return line;
}

// Where the loopback interface is the same: a machine, and on it a network namespace.
std::string host_name() {
  char network[48] = "";
  if (readlink("/proc/self/ns/net", network, sizeof network - 1) < 0) network[0] = '\0';
  return concat(first_line("/proc/sys/kernel/random/boot_id"), " ", network);
}

sockaddr_in loopback(std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

}  // namespace

// --- Sockets

Descriptor Liveness::tcp(int flags) {
  return Descriptor::adopt([flags] { return socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | flags, 0); });
}

// --- Start and end

Liveness::Liveness(int rank, int size) : rank_(rank), size_(size), dead_(static_cast<std::size_t>(size)) {
  copy_text(host_name(), contact_.host);
  if (rank_ == 0) listen();
}

Liveness::~Liveness() {
  if (!thread_.joinable()) return;
  stop_ = true;
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = write(wake_.get(), &one, sizeof one);
  thread_.join();
}

void Liveness::listen() {
  std::random_device random;
  contact_.token = (std::uint64_t{random()} << 32) | random();
  sockaddr_in address = loopback(0);
  socklen_t length = sizeof address;
  Descriptor socket = tcp(SOCK_NONBLOCK);  // whoever knocked may be gone again at accept()
  if (!socket || bind(socket.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      ::listen(socket.get(), size_ + kMaxStrangers) != 0 ||
      getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    return;
  }
  contact_.port = ntohs(address.sin_port);
  listener_ = std::move(socket);
}

std::string Liveness::start(std::span<const Contact> all) {
  const Contact& center = all.front();
  for (std::size_t r = 1; r < all.size(); ++r) {
    if (text_of(all[r].host) != text_of(center.host)) return concat("rank ", r, " is on another host than rank 0");
  }
  if (center.port == 0) return "rank 0 cannot listen on the loopback interface";
  token_ = center.token;
  wake_ = Descriptor::adopt([] { return eventfd(0, EFD_CLOEXEC); });
  if (!wake_) return concat("no event descriptor: ", std::strerror(errno));
  if (rank_ != 0) {
    const std::string reason = connect(center.port);
    if (!reason.empty()) return reason;
  }
  thread_ = std::thread([this] { run(); });
  return {};
}

std::string Liveness::connect(std::uint16_t port) {
  const sockaddr_in address = loopback(port);
  const timeval limit{kConnectSeconds, 0};
  Connection connection;
  connection.socket = tcp();
  const int fd = connection.socket.get();
  if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) != 0 ||
      ::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    return concat("no connection to rank 0 over the loopback interface: ", std::strerror(errno));
  }
  connection.rank = 0;
  send(connection, Kind::kHello, rank_);
  connections_.push_back(std::move(connection));
  return {};
}

void Liveness::goodbye() noexcept {
  std::unique_lock lock(mutex_);
  leaving_ = true;
  // Right after the start others may not have been heard yet, and would see their connection end before the goodbye.
  greeted_.wait_for(lock, kGreetingLimit, [this] { return !listener_; });
  for (const Connection& connection : connections_) send(connection, Kind::kGoodbye, rank_);
}

// --- The thread

void Liveness::run() {
  pthread_setname_np(pthread_self(), "zc-liveness");
  std::vector<pollfd> polled;
  while (!stop_) {
    polled.assign(1, {wake_.get(), POLLIN, 0});
    if (listener_) polled.push_back({listener_.get(), POLLIN, 0});
    const std::size_t first = polled.size();
    for (const Connection& connection : connections_) polled.push_back({connection.socket.get(), POLLIN, 0});
    if (poll(polled.data(), polled.size(), -1) < 0) continue;  // a signal

    std::lock_guard lock(mutex_);
    for (std::size_t i = polled.size(); i-- > first;) {
      if (polled[i].revents == 0) continue;
      const auto connection = connections_.begin() + static_cast<std::ptrdiff_t>(i - first);
      if (read(*connection)) continue;
      const Connection ended = std::move(*connection);
      connections_.erase(connection);
      if (ended.rank >= 0 && !ended.left) bury(ended.rank);
    }
    if (listener_ && polled[1].revents != 0) accept_one();
  }
}

void Liveness::accept_one() {
  const auto strangers = std::ranges::count(connections_, -1, &Connection::rank);
  Connection connection;
  connection.socket = Descriptor::adopt([this] { return accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC); });
  if (!connection.socket && (errno == EMFILE || errno == ENFILE || errno == ENOMEM)) {
    listener_ = {};  // it would stay readable; whoever has not come is not watched
  } else if (connection.socket && strangers < kMaxStrangers) {
    connections_.push_back(std::move(connection));
  }
}

bool Liveness::read(Connection& connection) {
  auto* const into = reinterpret_cast<char*>(&connection.incoming);
  const auto got =
      recv(connection.socket.get(), into + connection.filled, sizeof(Message) - connection.filled, MSG_DONTWAIT);
  if (got < 0) return errno == EAGAIN || errno == EINTR;  // else it was reset: data had not been read at its end
  if (got == 0) return false;
  connection.filled += static_cast<std::size_t>(got);
  if (connection.filled < sizeof(Message)) return true;
  connection.filled = 0;
  return take(connection);
}

bool Liveness::take(Connection& connection) {
  const Message& message = connection.incoming;
  if (message.token != token_ || message.rank < 0 || message.rank >= size_) return false;
  switch (message.kind) {
    case Kind::kHello:
      connection.rank = message.rank;
      if (leaving_) send(connection, Kind::kGoodbye, rank_);
      if (++num_greeted_ < size_ - 1) break;
      listener_ = {};
      greeted_.notify_all();
      break;
    case Kind::kGoodbye:
      connection.left = true;
      break;
    case Kind::kDied:
      bury(message.rank);
      break;
  }
  return true;
}

void Liveness::bury(int rank) {
  if (dead_[static_cast<std::size_t>(rank)].exchange(true)) return;
  ++num_dead_;
  if (rank_ != 0) return;
  for (const Connection& connection : connections_) send(connection, Kind::kDied, rank);
}

// What cannot be sent has a receiver that is gone, too.
void Liveness::send(const Connection& connection, Kind kind, int rank) const noexcept {
  const Message message{token_, kind, rank};
  [[maybe_unused]] const auto sent =
      ::send(connection.socket.get(), &message, sizeof message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

}  // namespace zc::comm
