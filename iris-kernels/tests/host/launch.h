// Launches of users' kernels as host code: each thread of each workgroup is a thread of the host.
#include <utility>

#include "hooks.cpp"

namespace {

template <class... Args, std::size_t... I>
void launch(void (*entry)(Args...), void** args, u32 groups, std::index_sequence<I...>) {
    const auto run = [&](Group* own, u32 thread) {
        group = own;
        thread_index = thread;
        rounds = 0;
        entry(*static_cast<Args*>(args[I])...);
    };
    std::vector<std::unique_ptr<Group>> all;
    std::vector<std::thread> threads;
    for (u32 index = 0; index < groups; ++index) {
        all.push_back(std::make_unique<Group>(index, groups));
        for (u32 thread = 0; thread < THREADS; ++thread) threads.emplace_back(run, all.back().get(), thread);
    }
    for (std::thread& thread : threads) thread.join();
}

template <class... Args> void launch(void (*entry)(Args...), void** args, u32 groups) {
    launch(entry, args, groups, std::index_sequence_for<Args...>{});
}

} // namespace
