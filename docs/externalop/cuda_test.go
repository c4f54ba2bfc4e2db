package externalop

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	G "gorgonia.org/gorgonia"
)

// cudaOp is an op with a method for Gorgonia's CUDA machine.
type cudaOp struct {
	*testOp
	calls int
}

func (r *cudaOp) CUDADo(G.External, G.Device, G.Value, ...G.Value) (G.Value, error) {
	r.calls++
	return nil, nil
}

var _ G.CUDADoer = (*cudaOp)(nil)

// TestCUDADoNeedsTheTag: without the tag cuda, which these tests are built
// without, CUDADo is never called; Do is.
func TestCUDADoNeedsTheTag(t *testing.T) {
	g := G.NewGraph()
	op := &cudaOp{testOp: plusOne("cuda")}
	y := G.Must(G.ApplyOp(op, input(g, "x", 1, 2)))
	run(t, g)
	has(t, "y", y.Value(), 2, 3)
	if op.calls != 0 {
		t.Errorf("CUDADo was called %d times", op.calls)
	}
}

// goList runs go list, of what lies on this machine already.
func goList(t *testing.T, args ...string) []string {
	t.Helper()
	c := exec.Command("go", append([]string{"list"}, args...)...)
	c.Env = append(os.Environ(), "GOPROXY=off")
	out, err := c.Output()
	if err != nil {
		t.Skipf("go list %v: %v", args, err)
	}
	return strings.Fields(string(out))
}

// TestNoCUDABindings: the default build has none of gorgonia.org/cu, whose init
// ends a process on a machine without a GPU; Gorgonia's build with the tag has.
func TestNoCUDABindings(t *testing.T) {
	if slices.ContainsFunc(goList(t, "-deps", "gorgonia.org/leanattention/..."), func(p string) bool {
		return p == "gorgonia.org/cu" || strings.HasPrefix(p, "gorgonia.org/cu/")
	}) {
		t.Error("a package imports gorgonia.org/cu")
	}
	if !slices.Contains(goList(t, "-deps", "-tags", "cuda", "gorgonia.org/gorgonia"), "gorgonia.org/cu") {
		t.Error("Gorgonia built with the tag cuda does not import gorgonia.org/cu: the page is out of date")
	}
}

// TestCUDASource: what the page says of the build with the tag cuda, which needs
// NVIDIA's headers and cannot run here, stands in Gorgonia's source.
func TestCUDASource(t *testing.T) {
	for _, c := range []struct{ claim, module, file, text string }{
		{"a method CUDADo puts the node on GPU 0", "gorgonia", "analysis.go",
			"case CUDADoer: if n.dataOn == CPU { n.dataOn = Device(0) }"},
		{"there is prealloc where CallsExtern is true", "gorgonia", "compile.go",
			"if node.op.CallsExtern() { compileLogf("},
		{"an input is copied at each run", "gorgonia", "vm_tape_cuda.go",
			"ctx.MemcpyHtoD(cu.DevicePtr(to.Uintptr()), valueToPointer(from), memsize)"},
		{"2.5 times the values is taken as managed memory", "gorgonia", "cuda/external.go",
			"var allocsize int64 = 2*size + (size / 2) + minAllocSize"},
		{"that memory is managed", "gorgonia", "cuda/external.go", "cu.MemAllocManaged(allocsize, cu.AttachGlobal)"},
		{"Reset frees all of it", "gorgonia", "cuda.go", "m.engines[i].ResetAllocator()"},
		{"DoWork works on copies of engines", "gorgonia", "cuda.go", "for _, e := range m.engines { if err := e.DoWork()"},
		{"so does Contexts", "gorgonia", "cuda.go", "for _, e := range m.engines { retVal = append(retVal, e.Context()) }"},
		{"the channel for work is sent to", "gorgonia", "cuda.go", "m.workAvailable <- false"},
		{"and never made", "gorgonia", "cuda.go", "!workAvailable = make("},
		{"nor in the shape of a literal", "gorgonia", "cuda.go", "!workAvailable: make("},
		{"UseCudaFor is there without the tag only", "gorgonia", "vm_tape_nocuda.go", "func UseCudaFor("},
		{"it is not there with it", "gorgonia", "vm_tape_cuda.go", "!func UseCudaFor("},
		{"the init of cu ends the process", "cu", "cu.go", "os.Exit(1)"},
	} {
		dir := goList(t, "-m", "-f", "{{.Dir}}", "gorgonia.org/"+c.module)
		if len(dir) != 1 {
			t.Logf("%s: the source of gorgonia.org/%s is not on this machine", c.claim, c.module)
			continue
		}
		source, err := os.ReadFile(filepath.Join(dir[0], filepath.FromSlash(c.file)))
		if err != nil {
			t.Fatal(err)
		}
		text, not := strings.CutPrefix(c.text, "!")
		if strings.Contains(strings.Join(strings.Fields(string(source)), " "), text) == not {
			t.Errorf("%s: %s of %s says otherwise: the page is out of date", c.claim, c.file, dir[0])
		}
	}
}
