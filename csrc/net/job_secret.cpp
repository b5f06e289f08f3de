#include "net/job_secret.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <utility>

#include "muster/error.h"
#include "net/unix_socket.h"

namespace muster::net {

namespace {

constexpr const char* kVariable = "MUSTER_SECRET_FILE";
constexpr size_t kLeastBytes = 16;
constexpr size_t kMostBytes = 4096;
constexpr const char* kSpace = " \t\r\n";

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw InvalidArgument(std::string(kVariable) + "='" + path + "': " + what);
}

}  // namespace

std::optional<JobSecret> job_secret() {
  const char* const name = std::getenv(kVariable);
  if (name == nullptr || *name == '\0') return std::nullopt;
  const std::string path = name;
  // Opening a pipe must not wait for whoever writes it.
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status{};
  if (!file || ::fstat(file.get(), &status) != 0) fail(path, std::strerror(errno) + std::string("; check the path"));
  if (!S_ISREG(status.st_mode)) fail(path, "it is not a regular file; name one that holds the secret");
  if ((status.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    fail(path, "others than its owner have rights to it; take them away (chmod 600), or make a new secret");
  }
  char buffer[kMostBytes + 1];
  size_t length = 0;
  while (length < sizeof(buffer)) {
    const ssize_t got = ::read(file.get(), buffer + length, sizeof(buffer) - length);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(path, std::strerror(errno) + std::string("; check its disk"));
    if (got == 0) break;
    length += static_cast<size_t>(got);
  }
  if (length > kMostBytes) fail(path, "it is longer than " + std::to_string(kMostBytes) + " bytes; name another file");
  std::string_view text(buffer, length);
  text = text.substr(0, text.find_last_not_of(kSpace) + 1);
  text.remove_prefix(std::min(text.find_first_not_of(kSpace), text.size()));
  if (text.size() < kLeastBytes) {
    fail(path, "a secret has at least " + std::to_string(kLeastBytes) +
                   " bytes; make one: (umask 077; head -c 32 /dev/urandom | base64 > FILE)");
  }
  return std::optional<JobSecret>(std::in_place, text);
}

}  // namespace muster::net
