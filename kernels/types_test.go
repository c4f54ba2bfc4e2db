package kernels

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/ptx"
)

// The numbers of types that kernels are told (types.cuh), and how each has 1, 2, 3 and 4.
var stored = map[int32]any{
	0: [4]float32{1, 2, 3, 4},
	2: [4]half.Float16{half.FromFloat32(1), half.FromFloat32(2), half.FromFloat32(3), half.FromFloat32(4)},
	3: [4]half.BFloat16{half.BFromFloat32(1), half.BFromFloat32(2), half.BFromFloat32(3), half.BFromFloat32(4)},
}

// machine has a kernel's memory, which Go does not move.
type machine struct {
	memory ptx.Memory
	pinned runtime.Pinner
}

// put is memory that begins with data.
func (m *machine) put(t *testing.T, data any) *[64]byte {
	t.Helper()
	at := new([64]byte)
	copy(at[:], encoded(t, data))
	m.pinned.Pin(at)
	m.memory = append(m.memory, ptx.Range{Address: address(at), Bytes: int64(len(at))})
	return at
}

func address(at *[64]byte) uint64 { return uint64(uintptr(unsafe.Pointer(at))) }

// kernelOf is a kernel of PTX.
func kernelOf(t *testing.T, unit, name string) *ptx.Kernel {
	t.Helper()
	image, err := (&store{files: os.DirFS(".")}).image(unit, 120)
	if err != nil {
		t.Fatal(err)
	}
	module, err := ptx.Parse(string(image))
	if err != nil {
		t.Fatal(err)
	}
	k, err := module.Kernel(name)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// run executes a warp.
func (m *machine) run(t *testing.T, k *ptx.Kernel, params any) error {
	t.Helper()
	b := encoded(t, params)
	if len(b) != k.ParamBytes() {
		t.Fatalf("the kernel takes %d bytes, not %d", k.ParamBytes(), len(b))
	}
	slices.SortFunc(m.memory, func(a, b ptx.Range) int { return cmp.Compare(a.Address, b.Address) })
	return k.Run(ptx.Launch{Grid: 1, Block: 32, Params: b}, m.memory)
}

func encoded(t *testing.T, data any) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := binary.Write(&b, binary.LittleEndian, data); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// stopped says whether a launch did what kernels do of a type that they do not know.
func stopped(err error) bool { return err != nil && strings.Contains(err.Error(), "a trap") }

// Kernels take each type for itself, and none for another: a number that they do not know
// stops a launch.
func TestTypesAtRunTime(t *testing.T) {
	if runtime.GOARCH != "amd64" && runtime.GOARCH != "arm64" {
		t.Skip("addresses of 64 bits")
	}
	appends, gathers := kernelOf(t, "append", "append_rows"), kernelOf(t, "decoder", "decoder_gather")
	for from := int32(-1); from < 6; from++ {
		for to := int32(-1); to < 6; to++ {
			data, known := stored[from]
			want, wanted := stored[to]
			if !known {
				data = stored[0]
			}
			m := &machine{}
			keys, values := m.put(t, [8]uint64{}), m.put(t, [8]uint64{})
			fresh, slots := m.put(t, data), m.put(t, [8]uint64{})
			err := m.run(t, appends, struct {
				NewKeys, NewValues, Keys, Values, Slots uint64
				HeadRows, Heads, Dim, NewType, Type     int32
				_                                       int32
			}{address(fresh), address(fresh), address(keys), address(values), address(slots), 1, 1, 4, from, to, 0})
			if known && wanted {
				for _, at := range []*[64]byte{keys, values} {
					if bits := encoded(t, want); err != nil || !bytes.HasPrefix(at[:], bits) {
						t.Errorf("append of type %d to %d: %v, %v", from, to, at[:len(bits)], err)
					}
				}
			} else if !stopped(err) || *keys != [64]byte{} {
				t.Errorf("append of type %d to %d wrote %v: %v", from, to, keys[:16], err)
			}
			m.pinned.Unpin()
		}
		m := &machine{}
		data, known := stored[from]
		if !known {
			data = stored[0]
		}
		table, ids, y := m.put(t, data), m.put(t, [8]uint64{}), m.put(t, [8]uint64{})
		err := m.run(t, gathers, struct {
			Table, IDs, Residual, Y, Second, SecondIDs, Sum uint64
			N, Rows, Type, SecondRows, SecondType, _        int32
		}{Table: address(table), IDs: address(ids), Y: address(y), N: 4, Rows: 1, Type: from})
		if known {
			if bits := encoded(t, stored[0]); err != nil || !bytes.HasPrefix(y[:], bits) {
				t.Errorf("gather of type %d: %v, %v", from, y[:16], err)
			}
		} else if !stopped(err) {
			t.Errorf("gather of type %d gave %v: %v", from, y[:16], err)
		}
		m.pinned.Unpin()
	}
}

// types.cuh alone tells types apart: whoever else did would need a case for each new one.
func TestTypesInOnePlace(t *testing.T) {
	files, err := filepath.Glob("*.cu*")
	if err != nil || len(files) < 9 {
		t.Fatal(files, err)
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if f == "types.cuh" {
			continue
		}
		if found := regexp.MustCompile(`\b(F32|F16|BF16)\b`).Find(text); found != nil {
			t.Errorf("%s tells types apart by %s: withStore does", f, found)
		}
	}
}
