// Launches of kernels as host code: each thread of each workgroup is a thread of the host.
#include <functional>
#include <tuple>
#include <utility>

#include "hooks.cpp"

namespace {

/// Runs `entry` with these arguments in `groups` workgroups, and returns when all have ended.
template <class... Args>
void launch(void (*entry)(Args...), const std::tuple<Args...>& args, u32 groups) {
    const auto run = [&](Group* own, u32 thread) {
        group = own;
        thread_index = thread;
        rounds = products = 0;
        std::apply(entry, args);
    };
    std::vector<std::unique_ptr<Group>> all;
    std::vector<std::thread> threads;
    for (u32 index = 0; index < groups; ++index) {
        all.push_back(std::make_unique<Group>(index, groups));
        for (u32 thread = 0; thread < THREADS; ++thread) threads.emplace_back(run, all.back().get(), thread);
    }
    for (std::thread& thread : threads) thread.join();
}

template <class T> T argument(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

/// Copies the arguments at `args` for a launch of `entry`, which the returned function performs.
template <class... Args>
std::function<void()> bound(void (*entry)(Args...), void* const* args, u32 groups) {
    const auto copy = [&]<std::size_t... I>(std::index_sequence<I...>) {
        return std::tuple<Args...>{argument<Args>(args[I])...};
    };
    return [=, copies = copy(std::index_sequence_for<Args...>{})] { launch(entry, copies, groups); };
}

template <class... Args> void launch(void (*entry)(Args...), void** args, u32 groups) {
    bound(entry, args, groups)();
}

} // namespace
