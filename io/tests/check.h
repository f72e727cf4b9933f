// The smallest test harness that says what failed: TEST(name) { CHECK(...); } and run_all_tests().
#pragma once

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace check {

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline bool add(const char* name, void (*body)()) {
  tests().push_back({name, body});
  return true;
}

inline int run_all_tests() {
  for (const Test& test : tests()) {
    std::printf("%s\n", test.name);
    std::fflush(stdout);
    test.body();
  }
  return 0;
}

}  // namespace check

#define TEST(name)                                                            \
  static void name();                                                         \
  [[maybe_unused]] static const bool name##_added = check::add(#name, &name); \
  static void name()

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                  \
    }                                                                                \
  } while (false)
