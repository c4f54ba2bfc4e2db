// Command build compiles the GPU modules of the directory above with NVRTC. It
// needs neither a GPU nor a CUDA toolkit: on linux/amd64 it fetches the compiler
// itself, with pip.
//
//	go -C kernels/build run .            build what changed, into kernels/modules
//	go -C kernels/build run . -check     are the modules of these sources? No compiler is needed.
//	go -C kernels/build run . -check -a  compile everything again and compare
//	go -C kernels/build run . -check -a -arch 80 -ptx /tmp/ptx    compare one image of each unit, and keep its PTX
//	go -C kernels/build run . -check -a -arch ptx90a -ptx /tmp/ptx    compare hashes of PTX alone, which takes half the time
//	go -C kernels/build run . -v -unit lean -arch 90 -o /tmp/modules
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
)

// version is that of the wheels in wheels.txt.
const version = "12.4.127"

// compiler is what the manifests name.
const compiler = "NVRTC " + version

// Nothing is annotated as device code since all is. Restrict is not an option
// here: workers read what others wrote.
var options = []string{"--std=c++17", "-default-device"}

// targets are what a release has images for, oldest first. PTX comes last: it
// is for GPUs newer than all of them.
var targets = []string{"sm_80", "sm_86", "sm_89", "sm_90", "compute_90"}

// config is what the flags say.
type config struct {
	sources, out   string
	nvrtc, headers string // directories; "" to fetch them
	python         string
	units, archs   []string // all if empty
	all            bool     // what is up to date too
	check          bool
	fetch          bool
	raw            bool
	ptx            string // directory of the PTX that images are made of; "" for none
	verbose        bool
}

// apart gives each unit a process of its own where several are compiled: what the
// compiler made before can change the bytes that it makes next. Tests have one process.
var apart bool

func main() {
	apart = true
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "build:", err)
		os.Exit(1)
	}
}

func run(args []string, stdout io.Writer) error {
	c := &config{}
	var units, archs string
	flags := flag.NewFlagSet("build", flag.ContinueOnError)
	flags.StringVar(&c.sources, "sources", "..", "`directory` of the sources")
	flags.StringVar(&c.out, "o", "", "`directory` of the modules, if not kernels/modules")
	flags.StringVar(&c.nvrtc, "nvrtc", "", "`directory` of libnvrtc.so.12 and libnvrtc-builtins.so.12.4, instead of fetching them")
	flags.StringVar(&c.headers, "headers", "", "`directory` of cuda_fp16.h and its like, instead of fetching them")
	flags.StringVar(&c.python, "python", "python3", "`command` that has pip, to fetch the compiler")
	flags.StringVar(&units, "unit", "", "build these `units` alone: lean,nn")
	flags.StringVar(&archs, "arch", "", "build for these `architectures` alone: 90 for sm_90, ptx, or ptx90a for PTX of another one")
	flags.BoolVar(&c.all, "a", false, "compile what is up to date too")
	flags.BoolVar(&c.check, "check", false, "write nothing, fail if the modules are not of these sources; with -a, compile and compare")
	flags.BoolVar(&c.fetch, "fetch", false, "fetch the compiler, no more")
	flags.BoolVar(&c.raw, "raw", false, "write each image to a file of its own, too")
	flags.StringVar(&c.ptx, "ptx", "", "write the PTX that images were assembled from to this `directory`, for an emulated GPU")
	flags.BoolVar(&c.verbose, "v", false, "print what each kernel takes: registers, spills, shared memory")
	if err := flags.Parse(args); errors.Is(err, flag.ErrHelp) {
		return nil
	} else if err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("what is %q?", flags.Args())
	}
	c.units = list(units)
	for _, a := range list(archs) {
		arch := "sm_" + a
		if a == "ptx" {
			arch = targets[len(targets)-1]
		}
		// What an emulated GPU executes instead of a cubin.
		if of, ok := strings.CutPrefix(a, "ptx"); ok && of != "" {
			arch = "compute_" + of
		} else if !slices.Contains(targets, arch) {
			return fmt.Errorf("-arch %s: there are %s", a, strings.Join(targets, ", "))
		}
		if c.check && arch != frontEnd && !slices.Contains(targets, arch) {
			return fmt.Errorf("-check -arch %s: modules have no hash of %s, only of %s", a, arch, frontEnd)
		}
		c.archs = append(c.archs, arch)
	}
	// A part of the modules would pass for all of them.
	if len(c.archs) > 0 && c.out == "" && !c.check {
		return errors.New("-arch needs a directory, -o")
	}
	if c.ptx != "" && (len(c.archs) != 1 || virtual(c.archs[0]) && !c.check) {
		return errors.New("-ptx needs one -arch: that of a cubin, or with -check ptx90a; -raw writes other PTX")
	}
	if c.out == "" {
		c.out = "../modules"
	}
	if c.fetch {
		return c.tools()
	}
	b := &builder{config: c, stdout: stdout}
	if apart && len(c.units) != 1 && (c.all || !c.check) {
		return b.eachApart(args)
	}
	if c.check {
		return b.verify()
	}
	return b.build()
}

// list splits at commas.
func list(s string) []string {
	return strings.FieldsFunc(s, func(r rune) bool { return r == ',' })
}

// virtual says whether images for this architecture are PTX.
func virtual(arch string) bool { return strings.HasPrefix(arch, "compute_") }
