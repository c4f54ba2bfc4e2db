package cuda_test

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"gorgonia.org/leanattention/internal/cuda"
)

// second is the error of a call that returns something too.
func second[T any](_ T, err error) error { return err }

// roundTrips sends random bytes of odd sizes through the device in every way.
func roundTrips(t *testing.T, dev *cuda.Device, s *cuda.Stream, most int) {
	t.Helper()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for _, n := range []int{1, 3, 255, 257, 1000, most - 1, most, 1 + r.IntN(most)} {
		src := make([]byte, n)
		for i := range src {
			src[i] = byte(r.Uint32())
		}
		const pad = 5
		a, err := dev.NewBuffer(int64(n + 2*pad))
		if err != nil {
			t.Fatal(err)
		}
		b, err := dev.NewBuffer(int64(n + pad))
		if err != nil {
			t.Fatal(err)
		}
		up, err := dev.NewHost(n + 1)
		if err != nil {
			t.Fatal(err)
		}
		down, err := dev.NewHost(n + pad)
		if err != nil {
			t.Fatal(err)
		}
		e, err := dev.NewEvent(false)
		if err != nil {
			t.Fatal(err)
		}
		check := func(what string, err error) {
			if err != nil {
				t.Fatalf("%d bytes: %s: %v", n, what, err)
			}
		}
		want := append(append(bytes.Repeat([]byte{0xee}, pad), src...), bytes.Repeat([]byte{0xee}, pad)...)
		check("set", a.Set(0, 0xee, int64(n+2*pad)))
		check("upload", a.Upload(pad, src))
		got := make([]byte, n+2*pad)
		check("download", a.Download(got, 0))
		if !bytes.Equal(got, want) {
			t.Errorf("%d bytes: what came back differs", n)
		}
		copy(up.Bytes()[1:], src)
		check("async set", s.Set(b, 0, 0x11, int64(n+pad)))
		check("async upload", s.Upload(a, 2*pad, up, 1, n))
		check("copy", s.Copy(b, pad, a, 2*pad, int64(n)))
		check("async download", s.Download(down, 0, b, 0, n+pad))
		check("record", s.Record(e))
		check("synchronize", e.Synchronize())
		if !bytes.Equal(down.Bytes(), append(bytes.Repeat([]byte{0x11}, pad), src...)) {
			t.Errorf("%d bytes: what came back on the stream differs", n)
		}
		check("nothing", a.Upload(int64(n+2*pad), nil))
		for _, c := range []interface{ Close() error }{a, b, up, down, e} {
			check("close", c.Close())
		}
	}
}
