package leanattention

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
)

// Between the host and a GPU, in all directions.
func TestDeviceSequenceIO(t *testing.T) {
	gpu, _ := FakeGPU(t)
	testSequenceIO(t, nil, gpu)
}

// Every call of the driver that fails once, in saving and in loading: the error is told,
// and the cache is as it was.
func TestDeviceSequenceIOFaults(t *testing.T) {
	defer func(n int) { chunkBytes = n }(chunkBytes)
	chunkBytes = 40 // several parts
	gpu, lib := FakeGPU(t)
	s, good := savedSequence(t, gpu, 7)
	c := s.cache
	for name, do := range map[string]func() error{
		"WriteTo": func() error {
			var b bytes.Buffer
			_, err := s.WriteTo(&b)
			if err == nil && !bytes.Equal(b.Bytes(), good) {
				t.Fatal("something else was saved")
			}
			return err
		},
		"ReadSequence": func() error {
			loaded, err := c.ReadSequence(bytes.NewReader(good))
			if err != nil {
				return err
			}
			lib.State().FailAt = 0
			if !bytes.Equal(saved(t, loaded), good) {
				t.Fatal("something else was loaded")
			}
			return loaded.Release()
		},
	} {
		failed := 0
		same := unchanged(t, c)
		for call := int64(1); ; call++ {
			at := lib.State().Calls + call
			lib.State().FailAt, lib.State().FailWith = at, 1
			err := do()
			lib.State().FailAt = 0
			if lib.State().Calls < at {
				noError(t, err)
				break
			}
			if err != nil {
				failed++
				if !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), "CUDA_ERROR") {
					t.Fatalf("call %d of %s: %v", call, name, err)
				}
			}
			same(fmt.Sprintf("call %d of %s", call, name))
			noError(t, do())
		}
		if failed < 10 {
			t.Errorf("only %d calls of %s fail", failed, name)
		}
	}
	// What a copy's end reports is reported, before the sequence is anybody's.
	before := booksOf(c)
	lib.State().FailIn("cuEventSynchronize", 1)
	if loaded, err := c.ReadSequence(bytes.NewReader(good)); err == nil || loaded != nil || !before.equal(booksOf(c)) {
		t.Errorf("a copy that fails when it is made: %v", err)
	}
	lib.State().FailIn("", 0)
	if !bytes.Equal(saved(t, s), good) {
		t.Error("the sequence has changed")
	}
	live := lib.Live()
	noError(t, c.Close())
	if lib.Live() >= live {
		t.Errorf("%d objects of %d are left", lib.Live(), live)
	}
}

// What can't be done on a GPU is refused, before anything is written.
func TestDeviceSequenceIOStates(t *testing.T) {
	gpu, _ := FakeGPU(t)
	s, good := savedSequence(t, gpu, 7)
	c := s.cache
	before := booksOf(c)
	wrong := func(what string, want error) {
		t.Helper()
		if n, err := s.WriteTo(io.Discard); n != 0 || !errors.Is(err, want) {
			t.Errorf("%s: WriteTo: %d bytes, %v, want %v", what, n, err, want)
		}
		if _, err := c.ReadSequence(bytes.NewReader(good)); !errors.Is(err, want) {
			t.Errorf("%s: ReadSequence: %v, want %v", what, err, want)
		}
		if !before.equal(booksOf(c)) {
			t.Errorf("%s: the cache has changed", what)
		}
	}
	_, err := gpu.Record(func() error {
		wrong("in a recording", ErrUnsupported)
		return nil
	})
	if err == nil {
		t.Log("an empty recording is one")
	}
	noError(t, gpu.Close())
	wrong("on a closed GPU", ErrClosed)
}
