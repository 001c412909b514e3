// Threads that work through one function together, with barriers that spin and then yield.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>
#include <sched.h>

namespace lf {

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// A team of `threads` (the caller is one of them). `run(f)` calls f(worker) in each; inside, `share(worker, n, g)` hands
// out 0 … n - 1 to whoever is free, and returns in all workers when all are done. A worker that another process
// keeps from its core takes fewer pieces; those who wait at a barrier give their core away after a while.
class Pool {
  public:
    explicit Pool(int threads) : size_(threads) {
        for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { work(i); });
    }

    ~Pool() {
        {
            std::lock_guard<std::mutex> hold(lock_);
            stop_ = true;
        }
        wake_.notify_all();
        for (auto& worker : workers_) worker.join();
    }

    int size() const { return size_; }

    template <class F>
    void run(F&& f) {
        Job<F> job(f);
        if (size_ > 1) {
            left_.store(size_ - 1, std::memory_order_relaxed);
            {
                std::lock_guard<std::mutex> hold(lock_);
                job_ = &job;
                number_++;
            }
            wake_.notify_all();
        }
        f(0);
        for (int spins = 0; size_ > 1 && left_.load(std::memory_order_acquire); spins++) wait(spins);
    }

    // Pieces go out in runs of an eighth of what each worker would get, the first run of each fixed: neighbours are near
    // in memory. `after()` is called in each worker when there are none left for it.
    template <class G, class After>
    void share(int worker, int n, G&& g, After&& after) {
        const int run = n / (8 * size_) > 1 ? n / (8 * size_) : 1;
        for (int i = worker * run; i < n; i = size_ * run + next_.fetch_add(run, std::memory_order_relaxed))
            for (int piece = i, end = i + run < n ? i + run : n; piece < end; piece++) g(piece);
        after();
        if (size_ > 1) meet();
        else next_.store(0, std::memory_order_relaxed);
    }

    template <class G>
    void share(int worker, int n, G&& g) {
        share(worker, n, g, [] {});
    }

    // Returns in all workers when all have come.
    void meet() {
        const int round = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round_.load(std::memory_order_acquire) == round; spins++) wait(spins);
    }

  private:
    struct Work {
        virtual void call(int worker) = 0;
        virtual ~Work() {}
    };
    template <class F>
    struct Job : Work {
        F& f;
        explicit Job(F& given) : f(given) {}
        void call(int worker) override { f(worker); }
    };

    static void wait(int spins) {
        if (spins < 2000) pause();
        else sched_yield();
    }

    void work(int worker) {
        for (long seen = 0;;) {
            Work* job;
            {
                std::unique_lock<std::mutex> hold(lock_);
                wake_.wait(hold, [&] { return stop_ || number_ != seen; });
                if (stop_) return;
                seen = number_;
                job = job_;
            }
            job->call(worker);
            left_.fetch_sub(1, std::memory_order_acq_rel);
        }
    }

    const int size_;
    std::vector<std::thread> workers_;
    std::mutex lock_;
    std::condition_variable wake_;
    bool stop_ = false;
    long number_ = 0;
    Work* job_ = nullptr;
    alignas(64) std::atomic<int> left_{0};
    alignas(64) std::atomic<int> next_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> round_{0};
};

}  // namespace lf
