// Threads that do the work of streams, in fake drivers that compute.
#ifndef STANDIN_WORKER_H
#define STANDIN_WORKER_H

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace standin {

using Work = std::function<void()>;

/// Thread that does one piece of work after the other; destroying it waits for all of them.
class Worker {
  public:
    Worker() : thread([this] { work(); }) {}
    ~Worker() {
        enqueue({});
        thread.join();
    }
    void enqueue(Work item) {
        std::lock_guard guard(own);
        items.push_back(std::move(item));
        changed.notify_all();
    }
    bool is_idle() {
        std::lock_guard guard(own);
        return items.empty();
    }
    void wait() {
        std::unique_lock guard(own);
        changed.wait(guard, [this] { return items.empty(); });
    }

  private:
    void work() {
        for (;;) {
            Work item;
            {
                std::unique_lock guard(own);
                changed.wait(guard, [this] { return !items.empty(); });
                item = items.front();
            }
            if (!item) return;
            item();
            std::lock_guard guard(own);
            items.pop_front();
            changed.notify_all();
        }
    }
    std::mutex own;
    std::condition_variable changed;
    std::deque<Work> items;
    std::thread thread;
};

/// Recording of an event on a stream. A wait for the event waits for the recording that was the
/// latest when the wait was enqueued.
class Mark {
  public:
    void reach() {
        std::lock_guard guard(own);
        over = true;
        changed.notify_all();
    }
    void wait() {
        std::unique_lock guard(own);
        changed.wait(guard, [this] { return over; });
    }
    bool is_over() {
        std::lock_guard guard(own);
        return over;
    }

  private:
    std::mutex own;
    std::condition_variable changed;
    bool over = false;
};

} // namespace standin

#endif
