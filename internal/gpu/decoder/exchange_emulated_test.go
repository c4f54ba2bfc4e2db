//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package decoder

import (
	"fmt"
	"testing"
	"time"

	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/gpu/testgpu"
	"gorgonia.org/leanattention/internal/reftest"
)

func emulatedExchange(t testing.TB, members int, limit time.Duration) (*exchangeRig, *fakedriver.Library) {
	t.Helper()
	devs, lib := testgpu.EmulatedGroup(t, members, 5, 5)
	return exchangeOf(t, devs, limit), lib
}

func TestEmulatedExchange(t *testing.T) {
	for _, members := range []int{2, 3, 4, 8} {
		t.Run(fmt.Sprint(members), func(t *testing.T) {
			r, _ := emulatedExchange(t, members, 0)
			testExchange(t, r, reftest.Cases(t, 1, 12), 12000/members)
		})
	}
}

func TestEmulatedExchangeFails(t *testing.T) {
	r, _ := emulatedExchange(t, 3, 0)
	testExchangeFails(t, r, 100*time.Millisecond)
}
