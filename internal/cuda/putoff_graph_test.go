//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package cuda_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/cuda"
)

// TestPutOffStep: the second graph's first node makes the copies between two graphs, and the events are after the
// graph.
func TestPutOffStep(t *testing.T) {
	lib, dev := openFake(t)
	defer nothingLeft(t, lib, dev)
	l := newLate(t, dev)
	other, err := dev.NewEvent(false)
	noErrors(t, err)
	lib.Forget()
	noErrors(t,
		l.s.Copy(l.a, 0, l.b, 40, 64),
		l.s.Upload(l.a, 64, l.h, 8, 5000), l.s.Record(l.e),
		l.s.Copy(l.a, 8192, l.b, 20, 4),
		l.s.Upload(l.a, 16384, l.h, 0, 64), l.s.Record(other), l.s.Record(l.e))
	if lib.Log() != "" {
		t.Errorf("copies were not put off:\n%s", lib.Log())
	}
	if !l.e.IsPutOff() || !other.IsPutOff() {
		t.Error("nor were the events")
	}
	noErrors(t, l.s.Launch(l.graph))
	if !strings.Contains(lib.Log(), "grid 8 1 1 block 256 1 1 shared 0\n") {
		t.Errorf("not two blocks of 4 KB for each of four copies:\n%s", lib.Log())
	}
	queued(t, lib, "a graph", "cuGraphExecKernelNodeSetParams, cuGraphLaunch, cuEventRecord, cuEventRecord")
	if l.e.IsPutOff() || other.IsPutOff() {
		t.Error("the events are put off still")
	}
	want := bytes.Repeat([]byte{0xa5}, 64<<10)
	copy(want[64:], l.h.Bytes()[8:5008])
	copy(want[16384:], l.h.Bytes()[:64])
	if !bytes.Equal(content(t, l.a, 0, 64<<10), want) {
		t.Error("the copies were not made")
	}
	// One copy, by two streams; a launch without any does not make them again.
	second, err := dev.NewStream()
	noErrors(t, err, second.PutOff(copyKernel))
	for _, s := range []*cuda.Stream{l.s, second} {
		lib.Forget()
		noErrors(t, l.a.Set(0, 0, 64), s.Upload(l.a, 0, l.h, 4, 64), s.Launch(l.graph))
		if got := calls(lib.Log()); !strings.HasSuffix(got, "cuGraphExecKernelNodeSetParams, cuGraphLaunch") {
			t.Errorf("one copy: %s", got)
		}
		if got := content(t, l.a, 0, 64); !bytes.Equal(got, l.h.Bytes()[4:68]) {
			t.Errorf("one copy: %x", got)
		}
	}
	noErrors(t, l.a.Set(0, 0, 64))
	lib.Forget()
	noErrors(t, l.s.Launch(l.graph), l.s.Launch(l.graph))
	queued(t, lib, "no copies", "cuGraphExecKernelNodeSetParams, cuGraphLaunch, cuGraphLaunch")
	if got := content(t, l.a, 0, 64); !bytes.Equal(got, make([]byte, 64)) {
		t.Errorf("copies were made again: %x", got)
	}

	// A timed event is not recorded after the graph.
	timed, err := dev.NewEvent(true)
	noErrors(t, err)
	lib.Forget()
	noErrors(t, l.s.Upload(l.a, 0, l.h, 0, 64), l.s.Copy(l.a, 64, l.b, 0, 64), l.s.Record(timed), l.s.Launch(l.graph))
	queued(t, lib, "with a timed event", "kernel copy_pieces, cuEventRecord, cuGraphLaunch")
}

// TestPutOffAndOtherGraphs: a graph of a stream without deferral has no node for copies.
func TestPutOffAndOtherGraphs(t *testing.T) {
	lib, dev := openFake(t)
	defer nothingLeft(t, lib, dev)
	l := newLate(t, dev)
	plain, err := dev.NewStream()
	noErrors(t, err)
	lib.Forget()
	graph, err := plain.Capture(func() error { return l.kernel.Launch(plain, cuda.Grid{}, args()) })
	noErrors(t, err)
	queued(t, lib, "captured", "cuStreamBeginCapture_v2, kernel k_8, cuStreamEndCapture")
	lib.Forget()
	noErrors(t, l.s.Upload(l.a, 0, l.h, 0, 8), l.s.Upload(l.a, 8, l.h, 8, 8), l.s.Record(l.e), l.s.Launch(graph))
	queued(t, lib, "another graph", "kernel copy_pieces, cuEventRecord, cuGraphLaunch")
}

// TestPutOffInGraphFails: if a graph's copies fail, the copies stay deferred and the graph is not launched; the next
// call does both.
func TestPutOffInGraphFails(t *testing.T) {
	lib, dev := openFake(t)
	defer nothingLeft(t, lib, dev)
	l := newLate(t, dev)
	for _, call := range []string{"cuGraphExecKernelNodeSetParams", "cuGraphLaunch", "cuEventRecord"} {
		noErrors(t, l.a.Set(0, 0, 64), l.s.Upload(l.a, 0, l.h, 8, 8), l.s.Record(l.e))
		lib.State().FailIn(call, 2)
		err := l.s.Launch(l.graph)
		if last := call == "cuEventRecord"; last != (err == nil) || !last && !errors.Is(err, cuda.ErrOutOfMemory) {
			t.Errorf("%s fails: %v", call, err)
		}
		if !l.e.IsPutOff() {
			t.Errorf("%s fails: the event is gone", call)
		}
		lib.State().FailIn("", 0)
		if call == "cuEventRecord" {
			// The copies are made; the next call returns the event's error.
			if err := l.s.Copy(l.b, 0, l.b, 2, 1); !errors.Is(err, cuda.ErrOutOfMemory) {
				t.Errorf("behind a graph whose event failed: %v", err)
			}
		} else {
			if got := content(t, l.a, 0, 8); !bytes.Equal(got, make([]byte, 8)) {
				t.Errorf("%s fails: copies were made", call)
			}
			noErrors(t, l.s.Launch(l.graph))
		}
		if got := content(t, l.a, 0, 8); !bytes.Equal(got, l.h.Bytes()[8:16]) || l.e.IsPutOff() {
			t.Errorf("%s failed: %x, put off: %v", call, got, l.e.IsPutOff())
		}
		noErrors(t, l.s.Launch(l.graph))
	}
	for _, call := range []string{"cuLaunchKernel", "cuGraphGetRootNodes", "cuGraphInstantiateWithFlags"} {
		lib.State().FailIn(call, 2)
		if _, err := l.s.Capture(l.launch); !errors.Is(err, cuda.ErrOutOfMemory) {
			t.Errorf("a capture in which %s fails: %v", call, err)
		}
		lib.State().FailIn("", 0)
	}
}
