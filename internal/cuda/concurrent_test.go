//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package cuda_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
)

// onlyClosed uses a device and its objects from 8 goroutines while some of them close the objects and the device.
// Errors passed to `only` must be ErrClosed, and nothing may be left.
func onlyClosed(t *testing.T, lib *fakedriver.Library, dev *cuda.Device, use func(w int, only func(error))) {
	t.Helper()
	var wg sync.WaitGroup
	only := func(err error) {
		if err != nil && !errors.Is(err, cuda.ErrClosed) {
			t.Error(err)
		}
	}
	for w := range 8 {
		wg.Go(func() { use(w, only) })
	}
	wg.Wait()
	if err := dev.Close(); !errors.Is(err, cuda.ErrClosed) {
		t.Error(err)
	}
	if lib.Live() != 0 || lib.Defects() != 0 {
		t.Errorf("%d left, %d defects", lib.Live(), lib.Defects())
	}
}

// TestConcurrentUse: goroutines use one device and its objects while others close them. All errors are ErrClosed.
func TestConcurrentUse(t *testing.T) {
	lib, dev := openFake(t)
	shared := newUse(t, dev)
	onlyClosed(t, lib, dev, func(w int, only func(error)) {
		args := &cuda.Args{}
		for i := range 30 {
			b, err := dev.NewBuffer(int64(1 + w + i))
			only(err)
			only(shared.buf.Upload(0, []byte{byte(w)}))
			only(shared.s.Copy(shared.buf, 0, shared.buf, 32, 8))
			f, err := shared.m.Function(fmt.Sprintf("k%d_8", i%3))
			only(err)
			if err == nil && b != nil {
				args.Reset()
				only(args.Buffer(b, 0))
				only(f.Launch(shared.s, cuda.Grid{}, args))
			}
			if b != nil && i%2 == 0 {
				only(b.Close())
			}
			switch {
			case w == 1 && i == 10:
				only(shared.buf.Close())
			case w == 2 && i == 15:
				only(shared.s.Close())
			case w == 3 && i == 20:
				only(dev.Close())
			}
		}
	})
}

// TestPutOffConcurrentUse: goroutines copy on streams that defer copies while others close the objects of the copies.
// All errors are ErrClosed, and the driver sees no closed object.
func TestPutOffConcurrentUse(t *testing.T) {
	lib, dev := openFake(t)
	lib.State().Total = 1 << 30
	l := newLate(t, dev)
	onlyClosed(t, lib, dev, func(w int, only func(error)) {
		for i := range 60 {
			b, err := dev.NewBuffer(64)
			only(err)
			if b == nil {
				break
			}
			e, err := dev.NewEvent(false)
			only(err)
			only(l.s.Upload(b, 0, l.h, 0, 32))
			only(l.s.Copy(l.a, int64(w*64), b, 0, 32))
			if e != nil {
				only(l.s.Record(e))
				e.IsPutOff()
				switch i % 4 {
				case 0:
					only(e.Synchronize())
				case 1:
					only(l.s.Wait(e))
				case 2:
					only(second(e.Done()))
				}
			}
			only(b.Close())
			if e != nil {
				only(e.Close())
			}
			switch {
			case w == 1 && i%10 == 0:
				only(l.s.Launch(l.graph))
			case w == 2 && i == 30:
				only(l.a.Close())
			case w == 3 && i == 40:
				only(l.s.Close())
			case w == 4 && i == 50:
				only(dev.Close())
			}
		}
	})
}
