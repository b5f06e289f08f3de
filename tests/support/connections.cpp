#include "support/connections.h"

#include <sys/socket.h>

#include <cstdlib>
#include <filesystem>

namespace muster::testing {

std::set<int> connections() {
  std::set<int> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::atoi(entry.path().filename().c_str());
    int listens = 0;
    socklen_t size = sizeof(listens);
    if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) == 0 && listens == 0) found.insert(fd);
  }
  return found;
}

void cut(int connection) { ::shutdown(connection, SHUT_RDWR); }

}  // namespace muster::testing
