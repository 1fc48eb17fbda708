package tiering

import (
	"errors"
	"log/slog"
	"runtime"
	"sync"
)

func workerCount() int {
	return max(1, min(8, runtime.NumCPU()))
}

// parallel runs do(0) … do(n-1) on some goroutines. A panic in one is an error.
func parallel(workers, n int, do func(i int)) error {
	var wg sync.WaitGroup
	errs := make([]error, workers)
	for w := range errs {
		wg.Add(1)
		go func() {
			defer wg.Done()
			defer func() {
				if p := recover(); p != nil {
					errs[w] = errors.New("panic while copying")
					slog.Error("kv tiering: panic while copying", "panic", p)
				}
			}()
			for i := w; i < n; i += len(errs) {
				do(i)
			}
		}()
	}
	wg.Wait()
	return errors.Join(errs...)
}
