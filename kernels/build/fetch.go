package main

import (
	"archive/zip"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"strings"
)

//go:embed wheels.txt
var wheels []byte

// tools sees to it that the compiler and its headers are there.
func (c *config) tools() error {
	if c.nvrtc != "" && c.headers != "" {
		return nil
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return err
	}
	dir := filepath.Join(cache, "leanattention", "nvrtc-"+version)
	if _, err := os.Stat(dir); err != nil {
		if err := c.fetchInto(dir); err != nil {
			return fmt.Errorf("fetching the compiler: %w", err)
		}
	}
	if c.nvrtc == "" {
		c.nvrtc = filepath.Join(dir, "lib")
	}
	if c.headers == "" {
		c.headers = filepath.Join(dir, "include")
	}
	return nil
}

// fetchInto makes the directory, whole or not at all.
func (c *config) fetchInto(dir string) (err error) {
	if runtime.GOOS != "linux" || runtime.GOARCH != "amd64" {
		return fmt.Errorf("there is none for %s/%s in wheels.txt: use -nvrtc and -headers", runtime.GOOS, runtime.GOARCH)
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return err
	}
	temp, err := os.MkdirTemp(filepath.Dir(dir), "fetch-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(temp)) }()

	list := filepath.Join(temp, "wheels.txt")
	if err := os.WriteFile(list, wheels, 0o644); err != nil {
		return err
	}
	// pip knows the index, the proxy and the certificates of this machine, and
	// refuses files of another hash.
	pip := exec.Command(c.python, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes",
		"--only-binary=:all:", "--platform=manylinux2014_x86_64", "--dest", temp, "--requirement", list)
	if out, err := pip.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", pip, err, out)
	}
	found, err := filepath.Glob(filepath.Join(temp, "*.whl"))
	if err != nil {
		return err
	}
	unpacked := filepath.Join(temp, "unpacked")
	for _, wheel := range found {
		if err := unzip(wheel, unpacked); err != nil {
			return fmt.Errorf("%s: %w", wheel, err)
		}
	}
	if err := os.Rename(unpacked, dir); err != nil {
		if _, there := os.Stat(dir); there == nil {
			return nil // someone else was faster
		}
		return err
	}
	return nil
}

// unzip takes the libraries of the compiler to lib, and headers to include.
func unzip(wheel, dir string) (err error) {
	z, err := zip.OpenReader(wheel)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, z.Close()) }()
	for _, f := range z.File {
		to := ""
		if name := path.Base(f.Name); strings.HasPrefix(name, "libnvrtc") {
			to = path.Join("lib", name)
		} else if _, header, ok := strings.Cut(f.Name, "cuda_runtime/include/"); ok && header != "" && !strings.HasSuffix(header, "/") {
			to = path.Join("include", header)
		}
		if to == "" {
			continue
		}
		if !filepath.IsLocal(to) {
			return fmt.Errorf("%s leads elsewhere", f.Name)
		}
		if err := extract(f, filepath.Join(dir, filepath.FromSlash(to))); err != nil {
			return err
		}
	}
	return nil
}

func extract(f *zip.File, to string) (err error) {
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	r, err := f.Open()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	w, err := os.Create(to)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	_, err = io.Copy(w, r)
	return err
}
