package cpu

import (
	"sync"
	"testing"
)

// TestOwn: an engine has one value of each type, whoever asks first, until it is closed.
func TestOwn(t *testing.T) {
	type mine struct{ n int }
	type other struct{ n int }
	var e Engine
	var wg sync.WaitGroup
	var got [8]*mine
	for i := range got {
		wg.Go(func() {
			if i == 0 {
				Own[other](&e).n = -1
			}
			got[i] = Own[mine](&e)
		})
	}
	wg.Wait()
	for i, p := range got {
		if p != got[0] || p != Own[mine](&e) || p.n != 0 {
			t.Fatalf("caller %d has another value", i)
		}
	}
	got[0].n = 1
	if n := Own[other](&e).n; n != -1 {
		t.Errorf("a value of another type is %d", n)
	}
	if Own[mine](new(Engine)).n != 0 {
		t.Error("two engines have one value")
	}
	e.Close()
	if Own[mine](&e).n != 0 {
		t.Error("the value outlives Close")
	}
}
