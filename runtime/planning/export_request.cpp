#include "runtime/planning/export_request.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>

#include "io/volume.h"
#include "runtime/base/exception.h"
#include "runtime/base/signals.h"
#include "runtime/base/utf8.h"

namespace tierflow {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::size_t kLargestMessage = 64 << 10;
constexpr int kQueue = 16, kMost = 32;         // who may wait, and who is looked at between two steps
constexpr int kConnected = 5000, kSaid = 100;  // milliseconds that a queue may stay full, and a message may take
constexpr int kSocket = SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK;

struct Address {
  sockaddr_un name{.sun_family = AF_UNIX, .sun_path = {}};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&name); }
};

// Without a name in the file system: it is gone with the process. Nothing where the folder has no state.
std::optional<Address> address_of(const fs::path& folder) {
  struct stat state {};
  if (stat((folder / (io::VolumeOptions{}.name + ".tfv")).c_str(), &state) != 0) return std::nullopt;
  Address address;
  const std::string name = fmt::format("tierflow-export-{:x}-{:x}", state.st_dev, state.st_ino);
  std::memcpy(address.name.sun_path + 1, name.data(), name.size());
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

// The process at the other end; 0 where it is another user's.
pid_t peer_of(int socket) {
  struct ucred peer {};
  socklen_t length = sizeof peer;
  const bool known = getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0;
  return known && peer.uid == geteuid() ? peer.pid : 0;
}

std::optional<std::string> received(int socket) {
  std::string message(kLargestMessage, '\0');
  const ssize_t length = recv(socket, message.data(), message.size(), MSG_TRUNC);
  if (length <= 0 || static_cast<std::size_t>(length) > message.size()) return std::nullopt;
  message.resize(static_cast<std::size_t>(length));
  return message;
}

bool sent(int socket, const std::string& message) {
  return send(socket, message.data(), message.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(message.size());
}

bool hung_up(int socket) {
  pollfd look{.fd = socket, .events = POLLRDHUP, .revents = 0};
  return poll(&look, 1, 0) > 0 && (look.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

// The run's end of a connection; empty where nobody there listens.
io::Descriptor connected(const Folders& storage) {
  for (const fs::path& folder : storage) {
    const auto address = address_of(folder);
    if (!address) continue;
    io::Descriptor socket(::socket(AF_UNIX, kSocket, 0));
    if (!socket) continue;
    int found = connect(socket.fd(), address->get(), address->length);
    for (int waited = 0; found != 0 && errno == EAGAIN && waited < kConnected; waited += 100) {  // others wait there
      throw_if_stopped();
      poll(nullptr, 0, 100);
      found = connect(socket.fd(), address->get(), address->length);
    }
    if (found == 0 && peer_of(socket.fd()) != 0) return socket;
  }
  return {};
}

// What somebody of this user asks for; nothing where it is taken back.
std::optional<std::string> asked(int socket) {
  if (peer_of(socket) == 0) return std::nullopt;
  pollfd look{.fd = socket, .events = POLLIN, .revents = 0};
  if (poll(&look, 1, kSaid) <= 0) return std::nullopt;
  const auto out = received(socket);
  return hung_up(socket) ? std::nullopt : out;
}

}  // namespace

ExportRequests::ExportRequests(const Folders& storage, const Say& say) {
  const auto address = storage.empty() ? std::nullopt : address_of(storage.front());
  if (!address) return;
  io::Descriptor socket(::socket(AF_UNIX, kSocket, 0));
  if (socket && bind(socket.fd(), address->get(), address->length) == 0 && listen(socket.fd(), kQueue) == 0)
    listens_ = std::move(socket);
  else
    say(fmt::format("warning: `tierflow export` cannot ask this run for its model: {}", std::strerror(errno)));
}

void ExportRequests::answer(std::int64_t step, const std::function<bool()>& may,
                            const std::function<void(const fs::path& out, const Answer& answer)>& write) {
  for (int looked = 0; listens_ && looked < kMost && may(); ++looked) {
    io::Descriptor socket(accept4(listens_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket && errno == EINTR) continue;
    if (!socket) return;
    const auto out = asked(socket.fd());
    if (!out) continue;
    const Answer answer = [this, step,
                           asks = std::make_shared<io::Descriptor>(std::move(socket))](const io::Error& why) {
      if (why.kind == io::ErrorKind::cancelled) {
        unanswered_ = std::move(*asks);
        return;
      }
      json text{{"step", step}};
      if (why) text = {{"error", static_cast<int>(why.kind)}, {"detail", why.message()}};
      sent(asks->fd(), text.dump(-1, ' ', false, json::error_handler_t::replace));
      *asks = {};  // it is answered
    };
    if (find_invalid_utf8(*out) != std::string::npos)
      answer({.kind = io::ErrorKind::usage,
              .detail = "--out, with the folders above it, must be UTF-8: name another folder"});
    else
      write(*out, answer);
  }
}

std::optional<std::int64_t> ask_for_export(const Folders& storage, const fs::path& out, const io::Error& locked,
                                           const Say& say) {
  const io::Descriptor socket = connected(storage);
  if (!socket || !sent(socket.fd(), out.string()))
    fail_with_more(
        locked,
        "it takes no request for its model: a `tierflow train` does once it trains, and a durable Python run after "
        "resume(); end it first, or ask again then");
  say(fmt::format("process {} trains with this state: it writes its model after the step that runs",
                  peer_of(socket.fd())));
  pollfd look{.fd = socket.fd(), .events = POLLIN, .revents = 0};
  while (poll(&look, 1, 200) <= 0) throw_if_stopped();
  const auto message = received(socket.fd());
  if (!message) return std::nullopt;
  const json answer = json::parse(*message, nullptr, false);
  if (answer.is_object() && answer.contains("step")) return answer["step"].get<std::int64_t>();
  throw Exception(static_cast<io::ErrorKind>(answer.value("error", static_cast<int>(io::ErrorKind::io))),
                  answer.value("detail", "the run could not write its model"));
}

}  // namespace tierflow
