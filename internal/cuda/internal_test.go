package cuda

import (
	"errors"
	"testing"
)

// BenchmarkWith is the cost of making the context current: what every call pays.
func BenchmarkWith(b *testing.B) {
	drv, err := Load()
	if errors.Is(err, ErrNoDevice) {
		b.Skipf("no GPU: %v", err)
	}
	if err != nil {
		b.Fatal(err)
	}
	v, err := drv.Open(0)
	if err != nil {
		b.Fatal(err)
	}
	defer v.Close()
	b.ReportAllocs()
	for b.Loop() {
		if err := v.with(func() error { return nil }); err != nil {
			b.Fatal(err)
		}
	}
}
