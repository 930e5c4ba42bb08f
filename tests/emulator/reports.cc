// What a failure says: which thread, in which device functions, and who waits for what.
#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>

#include "scheduler.h"

namespace emulator {

std::vector<std::string> trace_here() {
  void* frames[64];
  const int count = backtrace(frames, 64);
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) {
    Dl_info info;
    if (dladdr(frames[i], &info) == 0 || info.dli_sname == nullptr) continue;
    int status = 0;
    char* text = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
    std::string name = status == 0 ? text : info.dli_sname;
    std::free(text);
    if (name.rfind("emulator::", 0) == 0 || name.find("emulator::Entry") != std::string::npos) {
      continue;
    }
    int depth = 0;  // of template arguments, which are long
    std::string brief;
    for (char c : name) {
      if (c == '<') ++depth;
      if (depth == 0) brief += c;
      if (c == '>') --depth;
    }
    brief = brief.substr(0, brief.find('('));
    const auto space = brief.rfind(' ');
    if (space != std::string::npos) brief = brief.substr(space + 1);
    if (!brief.empty() && (names.empty() || names.back() != brief)) names.push_back(brief);
  }
  return names;
}

namespace {

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : " < ") + name;
  return text;
}

std::string thread_name(const Thread& thread) {
  char text[96];
  std::snprintf(text, sizeof text, "CTA %u, thread %u (warp %u, lane %d)", thread.place.block.x,
                thread.place.thread.x, thread.place.thread.x / 32, thread.lane);
  return text;
}

}  // namespace

void report_deadlock(std::vector<std::unique_ptr<Block>>& blocks) {
  std::string text = "deadlock: no thread can go on";
  reports = true;
  for (auto& block : blocks) {
    std::map<std::string, std::vector<unsigned>> groups;
    for (Thread& thread : block->threads) {
      if (thread.done) continue;
      thread.trace.clear();
      if (thread.started) resume(&thread);
      char what[160];
      std::string waits = thread.waits_for ? thread.waits_for : "nothing";
      std::snprintf(what, sizeof what, "%s (%u, %u)", waits.c_str(), thread.details[0],
                    thread.details[1]);
      waits = what;
      const auto barrier = block->barriers.find(thread.details[0]);
      if (waits.rfind("mbarrier", 0) == 0 && barrier != block->barriers.end()) {
        const MemoryBarrier& b = barrier->second;
        std::snprintf(what, sizeof what,
                      "mbarrier at shared byte %u, parity %u: %d of %d arrivals and %lld bytes are "
                      "missing",
                      thread.details[0] - kDynamicAt, thread.details[1], b.pending, b.expected,
                      static_cast<long long>(b.bytes));
        waits = what;
      }
      groups[waits + ", in " + joined(thread.trace)].push_back(thread.place.thread.x);
    }
    for (const auto& [what, threads] : groups) {
      std::string list;
      for (std::size_t i = 0; i < threads.size();) {
        std::size_t end = i;
        while (end + 1 < threads.size() && threads[end + 1] == threads[end] + 1) ++end;
        list += (list.empty() ? "" : ", ") + std::to_string(threads[i]);
        if (end > i) list += "-" + std::to_string(threads[end]);
        i = end + 1;
      }
      text += "\n  CTA " + std::to_string(block->threads[0].place.block.x) + ", threads " + list +
              ": " + what;
    }
  }
  reports = false;
  failure = text;
}

void fail(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (failure.empty()) {
    failure = text;
    if (current != nullptr) {
      failure += "; " + thread_name(*current) + ", in " + joined(trace_here());
    }
  }
  abandon();
}

}  // namespace emulator
