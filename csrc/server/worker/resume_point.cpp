#include "server/worker/resume_point.h"

#include <algorithm>
#include <set>

namespace muster::server {

namespace {

uint64_t begun(const Configured& server) {
  return server.command.empty() ? server.begun : std::max(server.begun, server.command.front().step);
}

std::set<uint64_t> points_of(const Configured& server) {
  std::set<uint64_t> points(server.cuts.begin(), server.cuts.end());
  if (server.made == server.begun) points.insert(server.made);
  return points;
}

}  // namespace

std::optional<Resume> ResumePoint::newest() const {
  uint64_t newest = 0;
  for (const auto& server : servers_) newest = std::max(newest, begun(server));
  Resume resume{newest, {}};
  for (const auto& server : servers_) {
    if (server.command.empty() || server.command.front().step != newest) continue;
    resume.command = server.command;
  }
  const bool is_near = std::all_of(servers_.begin(), servers_.end(), [&](const Configured& server) {
    return !server.owns || server.made == newest || (server.made + 1 == newest && !resume.command.empty());
  });
  if (!is_near) return std::nullopt;
  return resume;
}

std::optional<uint64_t> ResumePoint::common() const {
  std::optional<std::set<uint64_t>> common;
  for (const auto& server : servers_) {
    if (!server.owns) continue;
    const auto points = points_of(server);
    if (!common) {
      common = points;
    } else {
      std::erase_if(*common, [&](uint64_t step) { return !points.contains(step); });
    }
  }
  if (!common || common->empty()) return std::nullopt;
  return *common->rbegin();
}

std::string ResumePoint::in_words(size_t server) const {
  std::string text;
  for (const uint64_t step : points_of(servers_[server]))
    text += (text.empty() ? "step " : ", ") + std::to_string(step);
  return text.empty() ? "none" : text;
}

}  // namespace muster::server
