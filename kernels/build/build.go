package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"gorgonia.org/leanattention/internal/cuda/nvrtc"
	"gorgonia.org/leanattention/kernels/internal/pack"
)

// builder makes the modules of a directory.
type builder struct {
	*config
	stdout   io.Writer
	compiler *nvrtc.Compiler // opened at the first stale unit
}

// unit is one translation unit.
type unit struct {
	name    string
	files   map[string][]byte
	now     *pack.Manifest // of these files; without images until it is compiled
	targets []string       // of the build's, those that it has images for
	ptx     []string       // SHA-256 of the PTX of each compiled image
}

func (b *builder) load() (units []*unit, err error) {
	dir := os.DirFS(b.sources)
	names, err := pack.Units(dir)
	if err != nil {
		return nil, err
	}
	for _, name := range b.units {
		if !slices.Contains(names, name) {
			return nil, fmt.Errorf("there is no %s.cu", name)
		}
	}
	if len(b.units) > 0 {
		names = b.units
	}
	for _, name := range names {
		files, err := pack.Read(dir, name)
		if err != nil {
			return nil, err
		}
		source := files[name+".cu"]
		u := &unit{name, files, &pack.Manifest{Need: pack.Need(source), Compiler: compiler, Options: options, Sources: pack.Sources(files)}, nil, nil}
		if u.targets, err = without(pack.LeftOut(source)); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		units = append(units, u)
	}
	return units, nil
}

// build compiles units that changed.
func (b *builder) build() error {
	units, err := b.load()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(b.out, 0o755); err != nil {
		return err
	}
	for _, u := range units {
		if !b.all && !b.raw && b.stale(u) == nil {
			fmt.Fprintf(b.stdout, "%s is up to date\n", u.name)
			continue
		}
		images, err := b.compile(u)
		if err != nil {
			return err
		}
		if err := b.write(u, images); err != nil {
			return err
		}
	}
	return b.orphans(units, os.Remove)
}

// eachApart is build or verify with the same arguments, a process for each unit: as many
// at once as there are processors, since much of the compiler has one thread. The largest
// modules come first, or the last one would run alone.
func (b *builder) eachApart(args []string) error {
	units, err := b.load()
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	if b.all || b.raw || slices.ContainsFunc(units, func(u *unit) bool { return b.stale(u) != nil }) {
		if err := b.tools(); err != nil { // one of them fetches it, not all
			return err
		}
	}
	size := func(u *unit) int64 {
		info, err := os.Stat(filepath.Join(b.out, u.name+".bin"))
		if err != nil { // a new one
			return math.MaxInt64
		}
		return info.Size()
	}
	order := slices.Clone(units)
	slices.SortStableFunc(order, func(x, y *unit) int { return cmp.Compare(size(y), size(x)) })
	var (
		wg    sync.WaitGroup
		mu    sync.Mutex // of what follows, and of the output
		errs  []error
		slots = make(chan struct{}, runtime.GOMAXPROCS(0))
	)
	for _, u := range order {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			out, err := exec.Command(self, append(slices.Clone(args), "-unit", u.name)...).CombinedOutput()
			mu.Lock()
			defer mu.Unlock()
			b.stdout.Write(out)
			if err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", u.name, err))
			}
		})
	}
	wg.Wait()
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	found := os.Remove
	if b.check {
		found = hasNoSource
	}
	return b.orphans(units, found)
}

// verify finds modules that are not of these sources.
func (b *builder) verify() error {
	units, err := b.load()
	if err != nil {
		return err
	}
	for _, u := range units {
		if err := b.stale(u); err != nil {
			return fmt.Errorf("%w; go -C kernels/build run .", err)
		}
		if !b.all {
			continue
		}
		if err := b.compare(u); err != nil {
			return err
		}
	}
	return b.orphans(units, hasNoSource)
}

func hasNoSource(name string) error { return fmt.Errorf("%s has no source", name) }

// orphans calls found for the modules of units that there are no more.
func (b *builder) orphans(units []*unit, found func(name string) error) error {
	if len(b.units) > 0 {
		return nil
	}
	for _, ext := range []string{".json", ".bin"} {
		files, err := filepath.Glob(filepath.Join(b.out, "*"+ext))
		if err != nil {
			return err
		}
		for _, file := range files {
			name := strings.TrimSuffix(filepath.Base(file), ext)
			if !slices.ContainsFunc(units, func(u *unit) bool { return u.name == name }) {
				if err := found(file); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// without returns targets without some of them.
func without(some []string) ([]string, error) {
	for _, arch := range some {
		if !slices.Contains(targets, arch) {
			return nil, fmt.Errorf("no images for %q: there are %s", arch, strings.Join(targets, ", "))
		}
	}
	return slices.DeleteFunc(slices.Clone(targets), func(arch string) bool { return slices.Contains(some, arch) }), nil
}

func (b *builder) archsOr(all []string) []string {
	if len(b.archs) > 0 {
		return b.archs
	}
	return all
}

// stale is nil if the unit's module is of its present source.
func (b *builder) stale(u *unit) error {
	old, archive, err := b.module(u.name)
	if err != nil {
		return fmt.Errorf("%s: %w", u.name, err)
	}
	archs := u.targets
	if !b.check {
		archs = b.archsOr(u.targets)
	}
	if why := old.Stale(u.now, archs); why != "" {
		return fmt.Errorf("%s is not up to date: %s", u.name, why)
	}
	if _, err := old.Unpack(archive); err != nil {
		return fmt.Errorf("%s: %w", u.name, err)
	}
	return nil
}

func (b *builder) module(name string) (*pack.Manifest, []byte, error) {
	text, err := os.ReadFile(filepath.Join(b.out, name+".json"))
	if err != nil {
		return nil, nil, err
	}
	m, err := pack.Parse(text)
	if err != nil {
		return nil, nil, err
	}
	archive, err := os.ReadFile(filepath.Join(b.out, name+".bin"))
	return m, archive, err
}

// compare compiles the unit and fails if anything comes out that is not in its
// module.
func (b *builder) compare(u *unit) error {
	old, archive, err := b.module(u.name)
	if err != nil {
		return err
	}
	committed, err := old.Unpack(archive)
	if err != nil {
		return err
	}
	images, err := b.compile(u)
	if err != nil {
		return err
	}
	return b.same(u, old, committed, images)
}

// same fails if a compiled image differs from the committed one. For frontEnd, same fails if the committed image for 9.0
// was assembled from other PTX. An architecture that the unit's source leaves out was compiled for its PTX alone.
func (b *builder) same(u *unit, old *pack.Manifest, committed, images [][]byte) error {
	for i, arch := range b.archsOr(u.targets) {
		of := arch
		if arch == frontEnd {
			of = "sm_90"
		}
		if !slices.Contains(u.targets, of) {
			fmt.Fprintf(b.stdout, "%s: no image for %s, as its source says\n", u.name, of)
			continue
		}
		at := slices.IndexFunc(old.Images, func(i pack.Image) bool { return i.Arch == of })
		switch {
		case at < 0:
			return fmt.Errorf("%s has no image for %s", u.name, of)
		case arch == frontEnd && old.Images[at].PTX != u.ptx[i]:
			return fmt.Errorf("%s for %s: the image was assembled from PTX with SHA-256 %q, its source gives %s", u.name, of, old.Images[at].PTX, u.ptx[i])
		case arch == frontEnd:
			fmt.Fprintf(b.stdout, "%s %s: the same PTX\n", u.name, of)
		case !bytes.Equal(committed[at], images[i]):
			return fmt.Errorf("%s for %s is not what its source gives: %d bytes, %d now", u.name, of, len(committed[at]), len(images[i]))
		default:
			fmt.Fprintf(b.stdout, "%s %s: the same bytes\n", u.name, of)
		}
	}
	if len(b.archs) == 0 && !maps.Equal(old.Entries, u.now.Entries) {
		return fmt.Errorf("%s has kernels %v, %v now", u.name, old.Entries, u.now.Entries)
	}
	return nil
}

// compile makes all images of a unit, and enters its kernels in the manifest.
func (b *builder) compile(u *unit) (images [][]byte, err error) {
	if b.compiler == nil {
		if err := b.tools(); err != nil {
			return nil, err
		}
		if b.compiler, err = openNVRTC(b.nvrtc); err != nil {
			return nil, err
		}
		if !strings.HasPrefix(version, b.compiler.Version()+".") {
			return nil, fmt.Errorf("the compiler in %s is NVRTC %s, want %s", b.nvrtc, b.compiler.Version(), version)
		}
	}
	archs := b.archsOr(u.targets)
	images = make([][]byte, len(archs))
	ptx := make([][]byte, len(archs))
	logs, errs, took := make([]string, len(archs)), make([]error, len(archs)), make([]time.Duration, len(archs))
	var wg sync.WaitGroup
	slots := make(chan struct{}, runtime.GOMAXPROCS(0))
	for i, arch := range archs {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			start := time.Now()
			with := append([]string{"--include-path=" + b.headers}, options...)
			if !virtual(arch) {
				with = append(with, "--ptxas-options=-v") // changes what is printed, not the image
			}
			code, err := b.compiler.Compile(u.name+".cu", u.files, whole(arch), with...)
			images[i], ptx[i], logs[i], errs[i] = code.Cubin, code.PTX, code.Log, err
			if virtual(arch) {
				images[i] = code.PTX
			}
			took[i] = time.Since(start)
		})
	}
	wg.Wait()
	u.ptx = nil
	for i, arch := range archs {
		if errs[i] != nil {
			return nil, fmt.Errorf("%s for %s: %w", u.name, arch, errs[i])
		}
		u.ptx = append(u.ptx, pack.Sum(numberedCalls(ptx[i])))
		fmt.Fprintf(b.stdout, "%s %s: %d bytes, %.1f s\n", u.name, arch, len(images[i]), took[i].Seconds())
	}
	if b.ptx != "" { // of one architecture
		name := u.name + "." + strings.Replace(whole(archs[0]), "sm_", "compute_", 1) + ".ptx"
		if err := os.WriteFile(filepath.Join(b.ptx, name), ptx[0], 0o644); err != nil {
			return nil, err
		}
	}
	return images, b.describe(u, archs, images, logs)
}

// describe enters the kernels of the images, which must be the same in all.
func (b *builder) describe(u *unit, archs []string, images [][]byte, logs []string) error {
	of := make([]map[string]usage, len(archs))
	said := map[string]bool{}
	for i, arch := range archs {
		var warnings []string
		of[i], warnings = readUsage(logs[i])
		for _, w := range warnings {
			if !said[w] {
				fmt.Fprintln(b.stdout, w)
			}
			said[w] = true
		}
		if virtual(arch) {
			of[i] = ptxEntries(images[i])
		}
	}
	var err error
	if u.now.Entries, err = entries(archs, of); err != nil {
		return fmt.Errorf("%s: %w", u.name, err)
	}
	if b.verbose {
		printUsage(b.stdout, archs, of)
	}
	return nil
}

func (b *builder) write(u *unit, images [][]byte) error {
	archs := b.archsOr(u.targets)
	archive, err := u.now.Pack(archs, images)
	if err != nil {
		return err
	}
	for i, arch := range archs {
		if whole(arch) != arch {
			u.now.Images[i].PTX = u.ptx[i]
		}
	}
	text, err := u.now.Format()
	if err != nil {
		return err
	}
	files := map[string][]byte{u.name + ".bin": archive, u.name + ".json": text}
	if b.raw {
		for i, arch := range archs {
			ext := ".cubin"
			if virtual(arch) {
				ext = ".ptx"
			}
			files[u.name+"."+arch+ext] = images[i]
		}
	}
	for name, data := range files {
		if err := os.WriteFile(filepath.Join(b.out, name), data, 0o644); err != nil {
			return err
		}
	}
	fmt.Fprintf(b.stdout, "%s: %d kernels, %d bytes packed\n", u.name, len(u.now.Entries), len(archive))
	return nil
}

// whole is the architecture with what only its own GPUs have: a cubin runs on no
// others anyway.
func whole(arch string) string {
	if arch == "sm_90" {
		return "sm_90a"
	}
	return arch
}

var callNumber = regexp.MustCompile(`callseq \d+`)

// numberedCalls returns PTX whose comments number calls from 0 on, without gaps and in the same order. NVRTC goes on counting from unit to unit
// and from architecture to architecture, so its numbers depend on what a process has compiled before.
func numberedCalls(ptx []byte) []byte {
	numberOf := func(call []byte) int {
		n, _ := strconv.Atoi(string(call[len("callseq "):]))
		return n
	}
	var numbers []int
	for _, call := range callNumber.FindAll(ptx, -1) {
		numbers = append(numbers, numberOf(call))
	}
	slices.Sort(numbers)
	numbers = slices.Compact(numbers)
	return callNumber.ReplaceAllFunc(ptx, func(call []byte) []byte {
		i, _ := slices.BinarySearch(numbers, numberOf(call))
		return fmt.Appendf(nil, "callseq %d", i)
	})
}

// frontEnd is the architecture of a check that compares the PTX of 9.0 with its hash, and assembles nothing. The assembler takes as long as the rest
// of a compilation.
const frontEnd = "compute_90a"
