#!/bin/sh
# The first process of the virtual machine: two RDMA devices in software, then /job/command.
#
# ttyS0 is the console, ttyS1 what the command prints, ttyS2 its exit status.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
mkdir -p /proc /sys /dev /tmp /run /root
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm
mount -t tmpfs shm /dev/shm
stty -F /dev/ttyS1 raw -echo
stty -F /dev/ttyS2 raw -echo

finish() {
    echo "$1" > /dev/ttyS2
    sync
    echo b > /proc/sysrq-trigger  # with -no-reboot this ends the machine
    sleep 60
}

give_up() {
    echo "the machine could not be prepared: $1" > /dev/ttyS1
    finish 125
}

for module in veth rdma_rxe ib_uverbs sch_netem; do
    modprobe "$module" || give_up "no kernel module $module"
done
ip link set lo up

# rxe listens in the first network namespace only, so both devices live there. The kernel would
# hand packets between two local addresses over lo; rxe sends them by its device, and each end has
# to take packets whose source is local too.
ip link add wire0 type veth peer name wire1 || give_up "no veth"
for name in all default wire0 wire1; do
    cd "/proc/sys/net/ipv4/conf/$name"
    echo 0 > rp_filter
    echo 1 > accept_local
    echo 1 > arp_ignore
    echo 2 > arp_announce
done
cd /
for n in 0 1; do
    ip link set "wire$n" mtu 4500 up
    ip addr add "10.77.0.$((n + 1))/24" dev "wire$n"
    rdma link add "rxe$n" type rxe netdev "wire$n" || give_up "no device rxe$n: $(dmesg | tail -3)"
done

# Known for good, so that a connection can be made on a wire that loses everything.
for n in 0 1; do
    address=$(cat "/sys/class/net/wire$((1 - n))/address")
    ip neigh replace "10.77.0.$((2 - n))" lladdr "$address" dev "wire$n" nud permanent
done

# Reachable once the port is up and has the identifier that stands for its IPv4 address.
is_ready() {
    grep -q ACTIVE "/sys/class/infiniband/rxe$1/ports/1/state" &&
        cat "/sys/class/infiniband/rxe$1/ports/1/gids/"* 2>/dev/null | grep -q 'ffff:0a4d'
}
tries=100
until is_ready 0 && is_ready 1; do
    tries=$((tries - 1))
    [ "$tries" -gt 0 ] || give_up "the devices did not come up"
    sleep 0.1
done

ulimit -l unlimited
ulimit -c 0
ulimit -n 65536
export PDSERVE_RDMA_DEVICES=rxe0,rxe1 PDSERVE_RDMA_HOSTS=10.77.0.1,10.77.0.2
export PYTHONPATH=/site:/job/tree PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
cd /job/tree
sh /job/command < /dev/null > /dev/ttyS1 2>&1
finish $?
